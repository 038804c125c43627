"""Problems to solve: random ones, and those of DistTrain's evaluation."""

from dataclasses import replace

import numpy as np

from dataserver.planning.job.fields import Modality, ModelSize
from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.cluster import Cluster, cluster
from trainclient.orchestrate.networks import Network, read_network
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.workload import Stream, workload


def random_problem(seed: int, most_gpus: int = 64) -> Problem:
    """A model of any modules and sizes, on up to so many GPUs; some have little memory."""
    random = np.random.default_rng(seed)

    def size(kind: str) -> ModelSize:
        heads = int(random.choice([2, 4, 8, 16, 32]))
        width = heads * int(random.choice([32, 64, 128]))
        groups = heads // int(random.choice([1, 2])) if kind == "backbone" else heads
        return ModelSize(int(random.choice([2, 4, 6, 8, 12])), width, 4 * width, heads, groups,
                         int(random.choice([1_000, 32_000])) if kind == "backbone" else 0)  # fmt: skip

    has = random.random(2) < 0.8
    networks = [Network("backbone", "backbone", size("backbone"), input_gradient=bool(has[0]))]
    if has[0]:
        frozen = bool(random.random() < 0.2)
        networks.insert(0, Network("encoder", "encoder", size("encoder"), frozen=frozen))
        networks[1] = replace(networks[1], input_gradient=not frozen)
    if has[1]:
        networks.append(Network("generator", "generator", size("generator"), 256, input_gradient=True))
    sizes = [
        SampleSize(int(random.integers(1, 9)), int(random.integers(1, 200)),
                   (4 * int(random.integers(4, 200)),) if any(has) else ())
        for _ in range(3)
    ]  # fmt: skip
    generation = {(True, True): 0.5, (False, True): 1.0}.get((bool(has[0]), bool(has[1])), 0.0)
    stream = Stream(int(random.choice([12, 16, 24, 64, 96])), int(random.choice([512, 1024, 2048])),
                    generation=generation, packed=bool(random.random() < 0.7))  # fmt: skip
    per_node = int(random.choice([1, 4, 8]))
    nodes = int(random.integers(1, max(2, most_gpus // per_node + 1)))
    gpus = max(len(networks), nodes * per_node)
    memory = float(random.choice([0.5, 2, 8, 80]))
    devices = Cluster("a800", gpus, per_node, int(memory * 1e9), 200, 12.5, 312_000)
    return Problem(tuple(networks), devices, workload(sizes, stream))


def with_more_encoders(problem: Problem, seed: int) -> Problem:
    """The same with an encoder of clips, mostly one of videos as well, and samples that hold these."""
    random, networks = np.random.default_rng((seed, 1)), list(problem.networks)
    for modality in (Modality.AUDIO, Modality.VIDEO)[: int(random.choice([1, 2, 2]))]:
        heads = int(random.choice([2, 4, 8, 16]))
        size = ModelSize(int(random.choice([2, 4, 8])), heads * 64, heads * 256, heads, heads)
        network = Network(f"{modality}-encoder", "encoder", size, modality=modality, frozen=bool(random.random() < 0.2))
        networks.insert(0, network)
    trained = any(n.role.feeds and not n.frozen for n in networks)
    networks = [replace(n, input_gradient=trained) if n.role.spine else n for n in networks]
    there = (Modality.AUDIO, Modality.VIDEO)[: sum(n.modality is not None for n in networks)]
    sizes = [*problem.workload.sizes]
    for modality in there:
        groups = int(random.integers(1, 5)) if modality is Modality.VIDEO else 1
        patches = 4 * groups * int(random.integers(4, 60))
        sizes.append(SampleSize(int(random.integers(1, 9)), 30, (patches,), modality=(modality,), groups=(groups,)))
    cluster = replace(problem.cluster, gpus=max(problem.cluster.gpus, len(networks)))
    return replace(
        problem, networks=tuple(networks), cluster=cluster, workload=workload(sizes, problem.workload.stream)
    )


def random_towers(seed: int, most_gpus: int = 64) -> Problem:
    """Towers of any sizes on up to so many GPUs; some have little memory, some a frozen tower."""
    random = np.random.default_rng(seed)

    def tower(modality: str) -> Network:
        heads = int(random.choice([2, 4, 8, 16]))
        width = heads * int(random.choice([32, 64]))
        size = ModelSize(int(random.choice([2, 4, 8, 12])), width, 4 * width, heads, heads, 0)
        return Network(modality, "tower", size, modality=modality)

    towers = [tower("image"), tower("text")]
    if random.random() < 0.3:
        towers[0] = replace(towers[0], frozen=True)
    sizes = [SampleSize(int(random.integers(1, 9)), int(random.integers(1, 70)), (4 * int(random.integers(4, 200)),))
             for _ in range(3)]  # fmt: skip
    batch = int(random.choice([24, 32, 48, 96]))
    stream = Stream(batch * int(random.choice([1, 3])), 77, packed=False, contrastive_batch=batch)
    per_node = int(random.choice([1, 4, 8]))
    nodes = int(random.integers(1, max(2, most_gpus // per_node + 1)))
    memory = float(random.choice([0.05, 0.3, 1, 80]))
    devices = Cluster("a800", max(2, nodes * per_node), per_node, int(memory * 1e9), 200, 12.5, 312_000)
    return Problem(tuple(towers), devices, workload(sizes, stream))


def paper_problem(backbone: str, gpus: int, batch: int, pixels: int, seq_len: int = 8192) -> Problem:
    """ViT-H, a Llama of DistTrain's table 2 and a generator of 1B on A800, with images of one resolution.

    Half of the pairs are generated. Patches are of 16 pixels, as in the paper.
    """
    encoder = read_network("encoder", "vit-h")
    llm = replace(read_network("backbone", backbone), input_gradient=True)
    generator = replace(read_network("generator", "dit-1b"), input_gradient=True, condition_width=llm.size.width)
    sizes = [SampleSize(1, 100, ((pixels // 16) ** 2,))]
    return Problem(
        (encoder, llm, generator),
        cluster("a800", gpus),
        workload(sizes, Stream(batch, seq_len, generation=0.5)),
    )
