"""A layer of transformers' caches that holds a state instead of the keys and values of all tokens."""

from abc import abstractmethod

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class StateLayer(CacheLayerMixin):
    """The common interface of such layers; subclasses hold the state and select rows of it."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        """The number of tokens with their padding, which is the place of the next one in the batch."""

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the model stores its state here after the first tokens."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "a state keeps no keys and values of all tokens; it serves the layers of nalaformer's own and converted models, "
            "others need a DynamicCache"
        )

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # the name of get_max_length in transformers before 5.18
    get_max_cache_shape = get_max_length

    def crop(self, *args: object) -> None:
        raise ValueError(
            "a state cannot be cropped, since it cannot remove tokens; copy the cache (copy.deepcopy) before the tokens "
            "that you may want to take back"
        )

    @abstractmethod
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def offload(self) -> None:
        """Do nothing: a state is small and read at every token."""

    def prefetch(self) -> None:
        """Do nothing, as in `offload`."""
