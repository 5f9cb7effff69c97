"""A wrong key or value of a table is named with its mend."""

import pytest

from harness.errors import UsageError
from harness.scenario import load_scenario


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("concurrency=8", "it belongs elsewhere, write load.concurrency"),
        ("sessions=8", "write workload.sessions"),
        ("block_size=8", "write engine.block_size"),
        ("load.replicas=3", "write fleet.replicas"),
        ("load.concurency=8", "did you mean 'concurrency'?"),
        ("load.concurrency=many", "load.concurrency is text where a whole number or nothing is wanted"),
        ("load=3", "load is a whole number where a table is wanted"),
        ("seed=1.5", "seed is a number where a whole number is wanted"),
        ("engine.block_size=x", "engine: block_size is text where a whole number is wanted"),
        ("routers=[3]", "routers[0] is a whole number where text or a table is wanted"),
        ("routers=[{name='a', policy='dynamo-kv', option={}}]", "in routers[0]: did you mean 'options'?"),
        ("routers=[{name='a', policy='dynamo-kv', options={temprature=1}}]", "did you mean 'temperature'?"),
        ('churn=[{do="restrat", at_s=1}]', "churn[0].do = 'restrat': did you mean 'restart'? choose one of add, crash"),
        ("churn=[{at_s=1}]", "churn[0] has no 'do': add do = one of add, crash, drain, remove, restart"),
        ("load.driver=sesions", "load.driver = 'sesions': did you mean 'sessions'? choose one of rate, requests"),
        ("router.spread=x", "router.spread = 'x': choose one of session, turn"),
        ("load.stages=[{rate_per_s=3}]", "load.stages[0] has no 'duration_s': add it"),
        ('expect=[{that="x"}]', "expect[0] has no 'metric': add it"),
        ("workload.turns=1.5", "turns = 1.5 is a number where a whole number or a table with dist is wanted"),
        ("load.stages=[{rate=3}]", "in load.stages[0]: did you mean 'rate_per_s'?"),
    ],
)
def test_a_wrong_key_or_value_names_its_mend(override, says):
    with pytest.raises(UsageError) as refused:
        load_scenario("quickstart", overrides=[override])
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
