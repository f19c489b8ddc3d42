"""The main job: from rows of text to answered questions, by every system that decodes the same task.

`plan` lists what is trained and what answers, `stages` does each step, `results` joins what they found, `job` runs
them in order, and `kept` holds what survives a stop.
"""

from launch.quickstart.job import main

__all__ = ["main"]
