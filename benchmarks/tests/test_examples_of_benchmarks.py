"""The documents' examples of benchmarks run."""

import pytest

from helpers.examples import examples, run_example


@pytest.mark.parametrize("example", examples(beside="benchmarks"))
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example(example)
