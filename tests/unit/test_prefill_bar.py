"""The bar of a long prompt on the CPU back end: on a terminal, and where nothing else is shown."""

from __future__ import annotations

import io
import logging
import sys
from functools import partial

import pytest
from tqdm import tqdm

from engine import LLM, SamplingParams
from engine.runtime import cpu
from tests.unit.fakes import Terminal, write_model


@pytest.fixture
def shown(tmp_path, monkeypatch, caplog):
    """(level of the engine's log lines, stderr) -> what stderr has after `prompts` answers, each in a slot of its own."""
    directory = write_model(tmp_path / "m")
    monkeypatch.setattr(cpu, "BAR_AFTER_S", 0.0)
    monkeypatch.setattr(cpu, "tqdm", partial(tqdm, mininterval=0))

    def answer(level, stderr, prompts=1):
        caplog.set_level(level, "engine")
        with LLM(directory, load_format="dummy", device="cpu", max_num_seqs=2) as llm:
            monkeypatch.setattr(sys, "stderr", stderr)
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            llm.generate([[1, 2, 3]] * prompts, params, use_tqdm=False)
        return stderr.getvalue()

    return answer


def test_a_long_prompt_shows_a_bar_on_a_terminal(shown):
    text = shown(logging.INFO, Terminal())
    assert "  0 % of a prefill of 3 tokens" in text and text.count("100 % of") == 1
    assert "\n" not in text and text.rstrip(" ").endswith("\r"), "it is taken away at the end"


def test_nothing_in_a_pipe_nor_in_the_python_api(shown):
    assert shown(logging.INFO, io.StringIO()) == ""
    assert shown(logging.NOTSET, Terminal()) == "", "the API's default"
    assert shown(logging.WARNING, Terminal()) == "", "--quiet"


def test_a_short_prompt_shows_nothing(shown, monkeypatch):
    monkeypatch.setattr(cpu, "BAR_AFTER_S", 60.0)
    assert shown(logging.INFO, Terminal()) == ""


def test_a_bar_does_not_overwrite_another_answer(shown):
    text = shown(logging.INFO, Terminal(), prompts=2)
    assert text.count("100 % of") == 1
