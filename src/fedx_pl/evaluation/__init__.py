"""Ways to measure an encoder."""

from fedx_pl.evaluation.base import Evaluation
from fedx_pl.evaluation.embedding import Geometry
from fedx_pl.evaluation.few_labels import FewLabels
from fedx_pl.evaluation.probes import KNN, LinearProbe

__all__ = ["EVALUATIONS", "Evaluation"]

# By their words on the command line.
EVALUATIONS: dict[str, type[Evaluation]] = {
    "linear": LinearProbe,
    "knn": KNN,
    "semi": FewLabels,
    "geometry": Geometry,
}
