"""The rows of tiny models; what is trained on them is tested by the notebooks."""

from dlm_jax.train import tiny


def test_stories_follow_from_their_seed_and_add_up():
    rows = tiny.stories(50)
    assert rows == tiny.stories(50) != tiny.stories(50, seed=1)
    for row in rows:
        one, other = (int(word) for word in row["question"].split() if word.isdigit())
        assert row["answer"].endswith(f"has {one + other} things.")
