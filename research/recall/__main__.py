"""`python -m research.recall PAGE.md FOLDER`: write the tables of the page from the CSV files in the folder."""

import sys

from .tables import fill

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m research.recall PAGE.md FOLDER")
    fill(sys.argv[1], sys.argv[2])
