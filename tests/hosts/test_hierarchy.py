"""Groups that have several ranks on some of their hosts: one rank of each sends for all of them."""
import numpy as np
import pytest

import hosts
import programs
from hosts import Hosts, finish
from runs import Run

REASON = hosts.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")
FLAGS = ["--dp", 4]


def start(machines, places, program):
    """A rank on each of these hosts, without a launcher."""
    job = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": machines[0].ip, "MASTER_PORT": "29500"}
    return [machines[place].start(program, job | {"RANK": str(rank), "LOCAL_RANK": str(places[:rank].count(place))})
            for rank, place in enumerate(places)]


@pytest.mark.parametrize("places", [[0, 0, 0, 1], [0, 1, 0, 0], [0, 1, 1, 0]])
def test_hosts_need_not_have_equally_many_ranks_nor_in_order(folder, two, places):
    run = Run(folder, *FLAGS)
    for status, output in finish(start(two, places, run.program)):
        assert status == 0, output
    assert np.allclose(run.losses(), Run(folder, *FLAGS).on_one_host(), rtol=1e-5, atol=0)
    assert any("link_bytes" in use for use in programs.read_metrics(run.metrics)[-1]["comm"]["dp"].values())


class Sent:
    """What a step of the run sends, by its metrics and by the network."""
    def __init__(self, folder, shared_memory):
        on_link = []
        for steps in (2, 6):
            run = Run(folder, *FLAGS, "--steps", steps)
            with Hosts(2) as machines:
                run.on(machines, environment={"TESSERA_SHM": shared_memory})
                on_link.append(machines.network.bytes_sent())
        # Without what a run sends once.
        self.on_link = (on_link[1] - on_link[0]) / 4
        self.step = programs.read_metrics(run.metrics)[-1]["comm"]

    def of_rank_0(self, collective=None):
        return sum(use.get("link_bytes", 0) for uses in self.step.values() for name, use in uses.items()
                   if collective in (None, name))


def test_bytes_between_hosts_are_those_of_one_rank_of_each(folder):
    together, alone = Sent(folder, "1"), Sent(folder, "0")
    # Rank 0 sends what its host sends; headers and agreements add to it.
    assert 2 * together.of_rank_0() < together.on_link < 1.1 * 2 * together.of_rank_0()
    # Alone it sends as much of a reduce-scatter, and so do the other three.
    assert alone.of_rank_0("reduce_scatter") == together.of_rank_0("reduce_scatter")
    sent = alone.step["dp"]
    # A ring takes three ranks' parts from host to host, two of the four ranks' inputs' halves go there.
    expected = 2 * 3 * sent["all_gather"]["bytes"] + 4 * sent["reduce_scatter"]["bytes"] / 2
    assert expected < alone.on_link < 1.1 * expected
    assert together.on_link < 0.6 * alone.on_link
