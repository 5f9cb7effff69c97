"""`sglang-cache-aware` against the released sglang-router 0.3.2, placement by placement."""

import pytest

from harness.tests.peers.lockstep import BLOCK, Agreement, InOrder, Ours, compare, sequence
from harness.tests.peers.stub_workers import replay, routed
from routers import POLICIES, TextPrompt, make_policy

pytestmark = pytest.mark.peers

LIMITS = {"default limits": {}, "tight limits": {"balance_abs_threshold": 2, "balance_rel_threshold": 1.2}}


@pytest.mark.parametrize("case", LIMITS)
async def test_cache_aware_places_as_the_real_one_does(tmp_path, capsys, case):
    if "sglang-cache-aware" not in POLICIES:
        pytest.skip("no policy sglang-cache-aware is registered")
    limits = LIMITS[case]
    found = Agreement(f"sglang-cache-aware and sglang-router 0.3.2 cache_aware, {case}")
    args = [f"--{key.replace('_', '-')}={value}" for key, value in limits.items()]
    async with routed(tmp_path, "sglang-router", "cache_aware", *args) as (client, order, _):
        ours = Ours(make_policy("sglang-cache-aware", limits, InOrder(), BLOCK), order)
        ops = sequence(19, requests=300, sessions=12, in_flight=9)
        await replay(
            ops,
            client,
            ours,
            lambda op: TextPrompt(text_of(op)),
            lambda op: {"prompt": text_of(op)},
            lambda *each: compare(found, *each),
        )
    with capsys.disabled():
        print(f"\n{found.line()}")
    assert not found.different, "\n".join(found.different[:10])


def text_of(op) -> str:
    """Words with an umlaut among them: the tree counts characters, not bytes."""
    return " ".join(f"wörd{token}" for token in op.prompt)
