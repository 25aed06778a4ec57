"""The hook on a model class by itself: who is asked, how often, and what is left behind."""

from __future__ import annotations

import pytest

from hf_attn_backends.hf import hooks


class Base:
    """transformers' two methods: the check looks the answer up through the second."""

    def _check_and_adjust_attn_implementation(self, attn_implementation, is_init_check=False):
        return self.get_correct_attn_implementation(attn_implementation, is_init_check)

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        return requested_attention or "sdpa"


@pytest.fixture
def hooked():
    """A class with a hook, what its policy was asked, and what transformers accepted."""

    class Model(Base):
        pass

    asked, accepted = [], []

    def policy(model, value):
        asked.append(value)
        if value == "refuse":
            raise ValueError(value)
        return value, accepted.append

    hooks.install(Model, policy)
    yield Model, asked, accepted
    hooks.uninstall(Model)


def test_one_value_is_asked_about_once_though_both_methods_see_it(hooked):
    model_class, asked, accepted = hooked
    assert model_class()._check_and_adjust_attn_implementation(None) == "sdpa"
    assert (asked, accepted) == ([None], ["sdpa"])
    assert model_class().get_correct_attn_implementation("eager") == "eager"
    assert (asked, accepted) == ([None, "eager"], ["sdpa", "eager"])


def test_a_refusal_leaves_nothing_behind(hooked):
    model_class, asked, accepted = hooked
    model = model_class()
    for _ in range(2):  # the second time, too: the model is not taken for one inside a hook
        with pytest.raises(ValueError, match="refuse"):
            model._check_and_adjust_attn_implementation("refuse")
    assert (asked, accepted) == (["refuse", "refuse"], [])


def test_uninstalled_the_class_inherits_again(hooked):
    model_class, asked, _ = hooked
    hooks.uninstall(model_class)
    assert not any(name in vars(model_class) for name in hooks.METHODS)
    assert model_class()._check_and_adjust_attn_implementation("refuse") == "refuse"
    assert asked == []
