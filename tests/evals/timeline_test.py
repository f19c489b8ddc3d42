"""The picture of lanes: a box for each, where it worked and when."""

import xml.etree.ElementTree as ElementTree

from dlm_jax.decode import AsyncLane, NoCache
from dlm_jax.decode.asynclane import Compact, Lane
from dlm_jax.evals import timeline

LANES = [
    Lane(0, "gen", 0, 8, 2, -1, 0, "fork", 0, 1, 2), Lane(1, "ref", 0, 3, 3, 0, 1, "complete", 0, 3, 5),
    Lane(2, "gen", 3, 8, 4, 0, 1, "stop", 8, 3, 6), Lane(3, "gen", 11, 8, 0, 2, 2, "open", 0, 0, 0)]


def tags(image, name):
    return [e for e in ElementTree.fromstring(image).iter() if e.tag.endswith(name)]


def test_every_lane_that_ran_has_a_box_of_its_tokens_and_iterations():
    boxes = [e for e in tags(timeline.picture(LANES, [4]), "rect") if len(e)]
    assert [e[0].text for e in boxes] == [
        "lane 0 generates tokens 0 to 7, iterations 1 to 2: fork",
        "lane 1 refines tokens 0 to 2, iterations 3 to 5: complete",
        "lane 2 generates tokens 3 to 10, iterations 3 to 6: stop"]
    at = [{name: float(e.get(name)) for name in ("x", "y", "width", "height")} for e in boxes]
    assert at[1]["x"] == at[2]["x"] > at[0]["x"] and at[2]["width"] > at[1]["width"] > at[0]["width"]
    assert at[1]["y"] == at[0]["y"] and at[2]["y"] == at[0]["y"] + 3 * timeline.TOKEN
    assert [e.get("fill") for e in boxes] == [timeline.COLOURS[role] for role in ("gen", "ref", "gen")]


def test_forks_and_refreshes_are_marked():
    image = timeline.picture(LANES, [4])
    assert len(tags(image, "circle")) == 1 and len(tags(image, "line")) == 1
    assert not tags(timeline.picture(LANES), "line") and "refresh" not in timeline.picture(LANES)


def test_refreshes_follow_the_interval():
    assert timeline.refreshes(AsyncLane(cache=Compact(refresh_interval=3)), 10) == [4, 7, 10]
    assert timeline.refreshes(AsyncLane(cache=Compact(refresh_interval=0)), 10) == []
    assert timeline.refreshes(AsyncLane(cache=NoCache()), 10) == []
