"""Options of the engines; nothing here needs torch."""

from dataclasses import dataclass

from fedx_pl.options import Options, option


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Options of where clients train; they do not change results."""

    name: str = option("serial", "serial | ray (short: engine=ray)")
    workers: int = option(
        0,
        "ray: clients trained at once; 0: one per GPU, else per core",
        at_least=0,
        at_most=1024,
    )
    gpus_per_worker: float = option(
        -1.0,
        "ray: share of a GPU for each worker; -1: a whole one if there is one",
        example=0.5,
        at_least=0,
        at_most=1024,
        also=(-1,),
    )
    address: str = option(
        "", "ray: of a running cluster, or auto to find one; empty: start Ray here"
    )
    retries: int = option(1, "ray: times a client is tried again after its worker died", at_least=0)
