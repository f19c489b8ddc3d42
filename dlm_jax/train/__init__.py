"""Training: state, optimiser, sharding, the jitted step and the host loop around it."""
