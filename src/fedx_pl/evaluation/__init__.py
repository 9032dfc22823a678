"""Ways to measure an encoder."""

from fedx_pl.evaluation.base import Evaluation
from fedx_pl.parts import Parts

__all__ = ["EVALUATIONS", "Evaluation"]

# By their words on the command line.
EVALUATIONS: Parts[type[Evaluation]] = Parts(
    {
        "linear": "fedx_pl.evaluation.probes:LinearProbe",
        "knn": "fedx_pl.evaluation.probes:KNN",
        "semi": "fedx_pl.evaluation.few_labels:FewLabels",
        "geometry": "fedx_pl.evaluation.embedding:Geometry",
    }
)
