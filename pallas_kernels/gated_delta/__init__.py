"""The two-stream gated delta rule and its short convolution: reference, folded forms, the paper's routes."""
