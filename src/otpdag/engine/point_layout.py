"""A structure in the data's units, with the maps and the shapes of all parameters of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from otpdag.backward.amortized import AmortizedMap
from otpdag.backward.bidirectional import BidirectionalMap
from otpdag.backward.smoother import SequenceMap
from otpdag.structure import Structure, Theta, pack

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """What a flat point (R, P) means."""

    structure: Structure
    shapes: Mapping[str, tuple[int, ...]]
    maps: tuple[AmortizedMap, ...] = ()
    """Learned maps of rows, which a model keeps."""
    sequence_map: SequenceMap | BidirectionalMap | None = None
    """The learned map of sequences, which serves the fit alone."""

    @classmethod
    def of(
        cls,
        structure: Structure,
        phi: Theta | None = None,
        maps: tuple[AmortizedMap, ...] = (),
        sequence_map: SequenceMap | BidirectionalMap | None = None,
    ) -> Layout:
        """The model's own parameters, then those of its maps as they start (1, ...)."""
        shapes = {key: parameter.shape for key, parameter in structure.parameters().items()}
        shapes |= {key: tuple(value.shape[1:]) for key, value in (phi or {}).items()}
        return cls(structure, shapes, maps, sequence_map)

    def pack(self, theta: Theta) -> Tensor:
        """Parameters by name as a flat point."""
        return pack({key: theta[key] for key in self.shapes})
