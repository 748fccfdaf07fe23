"""Wrong training labels: how data get them, and how FedCorr finds and corrects them.

Everything here is a pure function of arrays; the training that FedCorr needs in between is in
`simulation.label_correction`.
"""

from fairfleet.lab.label_noise.detection import (
    most_suspect,
    noisy_clients,
    relabelled,
    suspects,
)
from fairfleet.lab.label_noise.dimension import intrinsic_dimension
from fairfleet.lab.label_noise.noise import LabelNoise, noise_levels, with_label_noise
from fairfleet.lab.label_noise.report import LabelReport, wrong_shares
from fairfleet.lab.label_noise.settings import LabelCorrection

__all__ = [
    "LabelCorrection",
    "LabelNoise",
    "LabelReport",
    "intrinsic_dimension",
    "most_suspect",
    "noise_levels",
    "noisy_clients",
    "relabelled",
    "suspects",
    "with_label_noise",
    "wrong_shares",
]
