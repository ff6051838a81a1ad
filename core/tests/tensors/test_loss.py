import pytest
import torch

from powertrain.errors import ConfigError
from powertrain.tensors.loss import LossInputs, LossOutput, MetricSums, check_output, cross_entropy, load_loss


def _inputs(**fields):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    return LossInputs(logprobs, None, {k: torch.tensor(v) for k, v in fields.items()}, torch.ones(2))


def test_cross_entropy_is_negative_logprob():
    out = load_loss("powertrain.tensors.loss:cross_entropy")(_inputs(), {})
    assert out.terms.tolist() == [1.0, 2.0]
    assert out.terms.requires_grad
    assert not out.metrics["nll"].requires_grad


def test_cross_entropy_refuses_config():
    with pytest.raises(ConfigError, match="beta"):
        cross_entropy(_inputs(), {"beta": 1})


@pytest.mark.parametrize("name", ["powertrain.tensors.loss", "powertrain.tensors.loss:nosuch", "no_such_module:f"])
def test_unknown_loss_names_itself(name):
    with pytest.raises(ConfigError, match=name.split(":")[-1]):
        load_loss(name)


def test_what_cannot_be_called_is_no_loss():
    with pytest.raises(ConfigError, match="not a function"):
        load_loss("powertrain.tensors.head:_UNSUPPORTED")


def test_missing_field_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"'advantages'.*old_logprobs"):
        _inputs(old_logprobs=[0.0, 0.0]).need("advantages")


@pytest.mark.parametrize(
    "output", [torch.ones(2), LossOutput(torch.tensor(1.0)), LossOutput(torch.ones(2), {"m": torch.ones(3)})]
)
def test_output_of_wrong_shape_is_refused(output):
    with pytest.raises(ConfigError, match="mine:loss"):
        check_output(output, 2, "mine:loss")


def test_metrics_do_not_depend_on_how_tokens_were_dealt():
    values = torch.tensor([1.0, 5.0, 3.0, -2.0, 0.5])
    whole, parts, other = MetricSums(), MetricSums(), MetricSums()
    whole.add({"m": values, "m_max": values}, 5)
    parts.add({"m": values[:1], "m_max": values[:1]}, 1)
    other.add({"m": values[1:], "m_max": values[1:]}, 4)
    other.add({"m": values[:0], "m_max": values[:0]}, 0)
    parts.merge(other)
    assert parts.results() == whole.results() == {"m": 1.5, "m_max": 5.0}


def test_no_scored_token_gives_no_mean():
    assert MetricSums().results() == {}
