"""The training of the middle: one kernel, one loop, its optimiser, and checkpoints that a run continues from."""
