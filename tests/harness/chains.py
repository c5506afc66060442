"""Which layers of a model ran in chains, and what they started for one another."""

from unittest import mock

from ds_sp_overlap.chain.chain import Chain


class Runs:
    """Counts what ran in chains: of each forward the layers, and how many of them found their q, k and v started.

    recompute   of how many layers the chain did the gradient checkpointing
    """

    def __init__(self):
        self.forwards, self.recompute = [], 0

    def __enter__(self):
        runs, begun, run = self, Chain.__init__, Chain.run

        def begin(chain, chunks):
            begun(chain, chunks)
            runs.forwards.append([])

        def count(chain, layer, successor, hidden, **options):
            expected = chain.ahead is layer
            runs.recompute += options["recompute"] != "none"
            out = run(chain, layer, successor, hidden, **options)
            runs.forwards[-1].append((expected and chain.in_step, chain.ahead is not None))
            return out

        self.patch = mock.patch.multiple(Chain, __init__=begin, run=count)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


def whole_chain(layers=3):
    """What `Runs` counts where each layer starts what the next one uses."""
    return [(at > 0, at < layers - 1) for at in range(layers)]


def ran(*layers):
    """What `Runs` counts in a forward: "-" of a layer by itself, ">" of one that starts the next, "<" of one that was started."""
    return [("<" in layer, ">" in layer) for layer in layers]
