"""Test what is hidden, and what is not."""

import pytest

from spmd_rl.config.config import Config, ModelConfig, RunConfig
from spmd_rl.config.loading import dump, settings
from spmd_rl.config.redact import hidden, hide_in
from spmd_rl.config.resume_policy import resume_problems

ENVIRONMENT = {
    "WANDB_API_KEY": "0123456789abcdef",
    "MY_SECRET": "0123456789abcdef-and-more",
    "TOKENIZERS_PARALLELISM": "false",
    "SSH_KEY_FILE": __file__,
    "DB_PASSWORD": "correct horse",
    "HOME": "/home/somebody",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key 0123456789abcdef here", "key *** here"),
        ("0123456789abcdef-and-more", "***"),
        ("correct horse battery", "*** battery"),
        (f"false {__file__} /home/somebody", f"false {__file__} /home/somebody"),
        ("https://user:word@host:80/a", "https://***@host:80/a"),
        ("hf://datasets/a@main/b.jsonl", "hf://datasets/a@main/b.jsonl"),
        ("see https://ghp_abc@host/a and s3://bucket/b", "see https://***@host/a and s3://bucket/b"),
        ("https://h/a?token=x.y/z&page=2#end", "https://h/a?token=***&page=2#end"),
        ("https://h/a?X-Amz-Signature=ab%2F&X-Amz-Date=1", "https://h/a?X-Amz-Signature=***&X-Amz-Date=1"),
        ("a@b.org, f(x)?key=1", "a@b.org, f(x)?key=1"),
    ],
)
def test_secrets_of_the_environment_and_of_addresses_are_hidden_and_nothing_else(text, shown):
    assert hidden(text, ENVIRONMENT) == shown
    assert hidden({"a": [text, 3, None, (text,)]}, ENVIRONMENT) == {"a": [shown, 3, None, (shown,)]}


def test_settings_as_they_are_kept_have_none_and_a_new_password_is_no_other_setting():
    one, other = (Config(ModelConfig("m"), run=RunConfig(name=f"https://me:{word}@host/")) for word in ("a1", "b2"))
    assert "https://***@host/" in dump(one) and settings(one)["run.name"] == "https://***@host/"
    assert resume_problems(settings(one), settings(other), ()) == []


def test_an_errors_causes_and_notes_are_cleaned_too(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    try:
        try:
            raise FileNotFoundError(2, "no hf_0123456789", "/x/hf_0123456789")
        except OSError as inner:
            raise ValueError("with hf_0123456789") from inner
    except ValueError as error:
        error.add_note("hf_0123456789 again")
        hide_in(error)
        said = f"{error} {error.__cause__} {error.__notes__}"
        assert "hf_" not in said and said.count("***") == 4
