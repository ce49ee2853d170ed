"""Generated data on the disk, with several processes that want it at once."""

import os
import subprocess
import sys
import threading

import pytest

from nalaformer.data.generated_folders import written_once

OTHER = """
import sys
from nalaformer.data.generated_folders import written_once

def write(folder):
    (folder / "theirs").touch()
    print("writing", flush=True)
    sys.stdin.readline()

written_once(sys.argv[1], write)
"""


def test_a_process_waits_for_the_one_that_writes_and_takes_its_data(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OTHER, str(tmp_path / "set")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout.readline() == "writing\n"
        threading.Timer(0.3, other.stdin.close).start()
        found = written_once(tmp_path / "set", lambda folder: pytest.fail("written twice"))
        assert [path.name for path in found.iterdir()] == ["theirs"]
    assert other.returncode == 0
