"""Masked diffusion: a schedule, a commit rule, a confidence, a cache policy and a stop, each open to its users."""
