"""AsyncLane's settings: what the paper states, and one place for what it does not."""

import numpy as np
import pytest

from configs import asynclane
from dlm_jax import decode
from dlm_jax.decode.asynclane import Boundary, Compact
from launch import decoders


def test_tasks_have_the_papers_delimiters_shots_and_lengths():
    assert asynclane.LENGTHS == (256, 512, 1024)
    assert asynclane.SHOTS == {"gsm8k_cot": 0, "gsm8k": 5, "math": 4, "mbpp": 3, "humaneval": 0}
    for task, shots in asynclane.SHOTS.items():
        entry = asynclane.DECODING[task]
        assert entry.decoder.boundary == ("code" if task in ("mbpp", "humaneval") else "math")
        assert entry.max_new_tokens == 256 and entry.source.endswith(f"{shots} shots") and "ours" in entry.source


def test_the_ablations_differ_in_what_their_tables_say():
    full, of = asynclane.DECODING["gsm8k_cot"].decoder, lambda name: asynclane.DECODING[name].decoder
    assert of("coupled") == full.replace(mode="coupled")
    assert of("commit_and_advance") == full.replace(mode="commit_and_advance")
    assert of("without_lookahead") == full.replace(lookahead=0)
    assert of("without_reuse") == full.replace(cache=Compact(32, 12, reuse_refresh_logits=False))
    assert of("without_both") == of("without_reuse").replace(lookahead=0)
    assert of("punctuation") == full.replace(boundary="punctuation")
    assert of("interval_16") == full.replace(boundary=Boundary(interval=16))
    plain = of("blockwise")
    assert (plain.mode, plain.lookahead, plain.commit, plain.cache) == (
        "blockwise", 0, decode.TopN(1), decode.NoCache())


@pytest.mark.parametrize("name", asynclane.DECODING)
def test_settings_suit_a_decoder(name):
    entry = asynclane.DECODING[name]
    assert entry.source
    entry.decoder.check_request([[1]], np.asarray([entry.max_new_tokens]), None, 0)


def test_the_command_line_reaches_lanes_and_their_parts():
    found = decoders.make("asynclane", ["boundary=code", "commit=TopN(2)", "cache=Compact(16, refresh_interval=4)",
                                        "cache.margin=8", "rho_min=0.25", "temperature=0.5"]).decoder
    assert found == decode.AsyncLane(boundary="code", commit=decode.TopN(2), cache=Compact(8, 4), rho_min=0.25,
                                     temperature=0.5)
    assert decoders.make(None, [], "asynclane:gsm8k").decoder == asynclane.DECODING["gsm8k"].decoder
    guided = decoders.make("asynclane", ["commit=GuideAgrees(accept=TopK(2))", "boundary=Boundary(delimiters=13)"])
    assert guided.decoder.boundary == Boundary((13,)) and guided.decoder.commit.accept == decode.guided.TopK(2)
    assert "asynclane" in decoders.catalogue()
