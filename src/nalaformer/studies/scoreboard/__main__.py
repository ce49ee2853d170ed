"""`python -m nalaformer.studies.scoreboard PAGE.md FOLDER`: write the tables of the page from the CSV files in the folder.

With a name that ends in .png, draw them instead.
"""

import sys

from .picture import draw
from .tables import fill, rows_of

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m nalaformer.studies.scoreboard PAGE.md|PICTURE.png FOLDER")
    if sys.argv[1].endswith(".png"):
        draw(rows_of(sys.argv[2]), sys.argv[1])
    else:
        fill(sys.argv[1], sys.argv[2])
