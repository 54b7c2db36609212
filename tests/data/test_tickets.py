"""Tickets travel between ranks as plain values."""

from dataclasses import asdict

from spmd_rl.data.tickets import SampleReward, Ticket


def test_tickets_and_scores_survive_being_written_as_plain_values():
    ticket = Ticket(9, 1, prompt_tokens=5, response_tokens=7, loss_tokens=6, finish_reason="stop", policy_version=3)
    scored = SampleReward(id=9, reward=0.5, cause="correct", scores={"math_answer": 1.0})
    assert Ticket(**asdict(ticket)) == ticket
    assert SampleReward(**asdict(scored)) == scored
    assert ticket.tokens == 12
