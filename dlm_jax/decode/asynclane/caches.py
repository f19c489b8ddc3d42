"""What lanes keep of earlier forwards."""

from __future__ import annotations

from flax import struct

from dlm_jax.decode.parts import Part, static, whole

PREFIX_STATES = ("fork", "live")


@struct.dataclass
class Compact(Part):
    """Each lane reads its own window and the cached prefix before it; now and then what is known is read anew.

    A refresh, like the prefill, reads the prompt, the meaningful prefix and a margin, in full view of each other
    (Eq. 12). Lanes that it covers take their logits from it and need no forward of their own.

    Attributes:
      margin: m, tokens read behind the meaningful prefix; from a block on, every lane is covered.
      refresh_interval: R, iterations from refresh to refresh; 0 is never.
      reuse_refresh_logits: whether covered lanes do without a forward of their own.
      reuse_prefill: whether that holds for the prefill, too.
      prefix_state: "fork" keeps the prefix as the lane that forked wrote it until a refresh; with "live", lanes that
        refine write their keys and values as well.

    Source: AsyncLane (arXiv 2606.08411), Sec. 3.4.
    """

    margin: int = whole(32)
    refresh_interval: int = whole(12)
    reuse_refresh_logits: bool = True
    reuse_prefill: bool = static(False)
    prefix_state: str = static("fork")

    def __post_init__(self):
        super().__post_init__()
        if self.prefix_state not in PREFIX_STATES:
            raise ValueError(f"prefix_state = {self.prefix_state!r}: accepted are {PREFIX_STATES}")
