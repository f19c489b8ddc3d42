"""Hyperparameters as frozen dataclasses in Python files, by name, with fields that flags may override.

`load("refusion:qwen3_8b", ["train.learning_rate=1e-4"])` takes `EXPERIMENTS["qwen3_8b"]` of `configs/refusion.py`.
"""

from configs.decoding import Decoding
from configs.experiment import Experiment, load, names

__all__ = ["Decoding", "Experiment", "load", "names"]
