"""What all scripts share at the command line: one line for a mistake, none for a reader that has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distmuon.commandline import refuse, run

ROOT = Path(__file__).parents[1]


def test_a_file_that_is_not_there_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    missing = tmp_path / "grid.yaml"
    with pytest.raises(FileNotFoundError) as caught:
        missing.read_text()
    assert refuse(caught.value) == 2
    assert capsys.readouterr() == ("", f"error: {missing}: No such file or directory\n")


@pytest.mark.parametrize("code", [0, 2, None])
def test_a_script_exits_with_the_code_of_its_main(code: int | None) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: code)
    assert ended.value.code == code


@pytest.mark.parametrize("lines", [1, 100_000], ids=["that fit into the pipe", "that do not"])
def test_a_reader_that_has_gone_ends_it_without_a_word(lines: int) -> None:
    main = f"lambda: print('\\n'.join(['a line of a table'] * {lines}))"
    words = [sys.executable, "-c", f"import sys; sys.stdin.read(); from distmuon.commandline import run; run({main})"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.close()  # it prints from here on
        assert (process.stderr.read(), process.wait()) == ("", 1)
