"""The rules for all plugins, and what this one counts."""

from llmopt_hello import Hello

import llmopt
from llmopt.testing import check_plugin, tiny_model


def test_it_keeps_to_the_rules() -> None:
    """Identity, company, blame, blocks, and the rest."""
    check_plugin(Hello)


def test_the_means_are_those_of_the_steps() -> None:
    """Two requests in one batch."""
    with llmopt.build(tiny_model(), plugins=[Hello()], self_test=False) as pipe:
        pipe.batch([[5, 6, 7], [8, 9]], max_new_tokens=4, ignore_eos=True, progress=False)
        # one step with 3 + 2 prompt tokens, then three steps with a token for each request
        assert pipe.stats()["schedule.hello"] == {"mean_requests": 2.0, "mean_tokens": 11 / 4}
