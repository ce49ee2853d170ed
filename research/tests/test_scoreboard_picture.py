"""The plot of the scoreboard shows the results of its files."""

from pathlib import Path

import pytest
from PIL import Image

from research.scoreboard import METHODS_OF_THE_BOARD, read_rows
from research.scoreboard.picture import NAMED, TEXT, draw, draw_plot, values_to_plot
from research.scoreboard.report import save_rows
from research.scoreboard.tables import read_folder_rows
from research.tests.commands import invoke

PROJECT = Path(__file__).parents[2]
RESULTS = PROJECT / "benchmarks" / "results"


def row(task, name, test, seed):
    found = dict.fromkeys(read_rows(RESULTS / "scoreboard_h200.csv")[0], "")
    label = METHODS_OF_THE_BOARD[name].label if name in METHODS_OF_THE_BOARD else name
    given = {"task": task, "method": label, "learning_rate": "0.1", "seed": str(seed), "steps": "5", "settings": "{}"}
    figure = "perplexity" if task == "manuals" else "accuracy"
    return found | given | {"test": str(test), "dev": str(test), "parameters": "1", "state_size": "1", "figure": figure}


ROWS = [
    *(row("mqar_80", "nala", test, seed) for seed, test in enumerate((0.5, 0.7))),
    row("pointing_256", "nala", 0.4, 0),
    row("mqar_80", "hedgehog", 0.3, 0),
    row("pointing_256", "a method without a name", 0.9, 0),
    *(row("manuals", name, test, 0) for name, test in (("relu", 28.0), ("softmax", 15.0))),
]


def test_points_have_both_lookups_and_texts_are_in_order():
    figures = values_to_plot(ROWS)
    assert figures.lookups == {"nala": pytest.approx((0.6, 0.1414, 0.4, 0.0), abs=1e-4)}
    assert figures.texts == {"softmax": (15.0, 0.0), "relu": (28.0, 0.0)}
    assert list(figures.texts) == ["softmax", "relu"]


def test_the_plot_names_its_points_and_shows_every_text():
    lookups, texts = draw_plot(values_to_plot(ROWS)).axes
    assert [text.get_text() for text in lookups.texts] == ["nala"]
    assert [label.get_text() for label in texts.get_yticklabels()] == ["relu", "softmax"]
    assert [text.get_text() for text in texts.texts] == ["28.0", "15.0"]


def test_the_documented_plot_shows_current_results():
    assert Image.open(PROJECT / "docs" / "scoreboard.png").text[TEXT] == values_to_plot(read_folder_rows(RESULTS)).text
    assert set(NAMED) <= set(values_to_plot(read_folder_rows(RESULTS)).lookups)


def test_the_command_draws_what_a_folder_holds(tmp_path):
    save_rows(tmp_path / "scoreboard_one.csv", ROWS)
    assert invoke("scoreboard", "page", tmp_path / "shown.png", tmp_path).exit_code == 0
    assert Image.open(tmp_path / "shown.png").text[TEXT] == values_to_plot(ROWS).text
    draw(ROWS, tmp_path / "again.png")
    assert Image.open(tmp_path / "again.png").size == Image.open(tmp_path / "shown.png").size
