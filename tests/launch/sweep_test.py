"""A sweep: every point is what evaluating it alone gives, a killed one goes on, and bad grids end early."""

import json

import jax
import pytest

import dlm_jax
from dlm_jax.data import sources, word_problems
from dlm_jax.data import tokenizer as tokenizers
from dlm_jax.evals import frontier
from dlm_jax.models import build
from dlm_jax.models.config import TransformerConfig
from launch import evaluate, report, sweep

RAW = list(word_problems.generate(3, seed=0, split="test"))
GRID = ["--grid", "slot_threshold=0.02,0.5", "--grid", "certainty=first,mean"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What both programs are asked, all but the decoder and --out."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = tokenizers.train(tokenizers.texts_of([sources.parse_row(row) for row in RAW]), 300)
    config = TransformerConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, initializer_range=0.3, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=tokenizer.mask_token_id)
    model = build.build(config)
    dlm_jax.save(folder / "model", model, build.init_params(model, jax.random.key(0)), tokenizer_from=tokenizer)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RAW))
    return ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--decoder", "refusion",
            "--set", "slot_size=4", "--set", "block_length=8", "--max-new-tokens", "8", "--timed", "1"]


@pytest.fixture
def no_pictures(monkeypatch):
    """Runs where matplotlib is not installed, too; its own test draws."""
    monkeypatch.setattr(frontier, "check", lambda: None)
    monkeypatch.setattr(frontier, "draw", lambda path, rows: path.write_bytes(b"picture"))


def test_a_killed_sweep_goes_on_and_its_points_are_what_evaluating_them_gives(place, tmp_path, capsys, monkeypatch,
                                                                              no_pictures):
    out, scored, plain = tmp_path / "out", [], evaluate.score

    def score(options, name, chosen, *rest):
        scored.append(chosen.decoder)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return plain(options, name, chosen, *rest)

    monkeypatch.setattr(evaluate, "score", score)
    arguments = [*place, *GRID, "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        sweep.main(arguments)
    assert {path.name for path in out.iterdir()} == {sweep.POINTS}
    assert sweep.main(arguments) == 2 and "--resume to go on" in capsys.readouterr().err
    assert sweep.main([*arguments, "--resume"]) == 0
    assert len(scored) == 5 and len(set(scored)) == 4  # the one that was killed is asked again, the first is not
    assert {path.name for path in out.iterdir()} == set(sweep.FILES)
    results = json.loads((out / "results.json").read_text())
    rows = results["systems"]
    assert [row["settings"] for row in rows] == [[f"slot_threshold={t}", f"certainty={c}"]
                                                 for t in ("0.02", "0.5") for c in ("first", "mean")]
    assert {row["family"] for row in rows} == {"refusion certainty=first", "refusion certainty=mean"}
    assert [row["knob"] for row in rows[:3:2]] == [{"field": "slot_threshold", "value": v} for v in (0.02, 0.5)]
    assert results["environment"]["jax"] == jax.__version__ and len(results["model"]["config"]) == 16
    alone = tmp_path / "alone"
    assert evaluate.main([*place, "--set", "slot_threshold=0.5", "--set", "certainty=mean", "--out", str(alone)]) == 0
    single, = json.loads((alone / "results.json").read_text())["systems"]
    for name in ("decoder", "accuracy", "accuracy_interval", "forwards", "tokens", "tokens_per_forward", "extracted"):
        assert rows[3][name] == single[name], name
    assert sweep.main([*arguments, "--resume"]) == 2 and "that run has ended" in capsys.readouterr().err
    assert report.main([str(out), str(alone), "--out", str(tmp_path / "report")]) == 0
    written = (tmp_path / "report" / "report.md").read_text()
    assert "| out slot_threshold=0.02 certainty=first |" in written and "| alone refusion |" in written


def test_a_kept_point_is_of_the_same_question_decoder_and_seed(place, tmp_path):
    def identity(*changes):
        options = sweep.parser().parse_args([*place, *GRID, "--out", str(tmp_path / "out"), *changes])
        return [sweep.identity(options, point, evaluate.read(options)) for point in sweep.points(options)]

    same = identity()
    assert len(set(same)) == 4 and identity("--resume") == same == identity("--out", "elsewhere")
    for change in (["--limit", "2"], ["--seed", "1"], ["--set", "slot_size=8"], ["--max-new-tokens", "9"]):
        assert not set(identity(*change)) & set(same), change


@pytest.mark.parametrize("change, reason", [
    (["--grid", "slot_treshold=0.1,0.2"], "no such field (did you mean 'slot_threshold'?)"),
    (["--grid", "slot_threshold=0.1,high"], "slot_threshold=high"), (["--grid", "slot_threshold"], "expected FIELD"),
    (["--grid", "slot_threshold=0.1,0.1"], "twice"), (["--grid", "slot_threshold=0.1,7"], "slot_threshold"),
    (["--grid", "temperature=0,1", "--check-lossless"], "makes no such claim")])
def test_a_bad_grid_ends_before_anything_is_read(place, tmp_path, capsys, no_pictures, change, reason):
    without = [*place, "--out", str(tmp_path / "out")]
    assert sweep.main([*without, *change]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()
