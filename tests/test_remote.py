"""Budgets that several ledgers share."""

import json

import pytest

from sesa_jax import remote, types
from sesa_jax.judge import ledger as judge_ledger
from sesa_jax.search import base


def test_judge_and_searches_have_one_limit_of_money(tmp_path):
  path = tmp_path / "spent.json"
  run = base.Ledger(cost=1.0, path=path)
  price = judge_ledger.Price(prompt=100_000.0, completion=200_000.0)
  judge = judge_ledger.Ledger(price, within=run)
  five = judge_ledger.Usage(1, 2)  # 0.1 + 2 x 0.2
  assert judge.reserve(five)
  judge.settle(five, judge_ledger.Usage(1, 1))  # 0.3 of it
  assert judge.reserve(five)
  assert not run.reserve({"searches": 1, "cost": 0.25})  # 0.3 + 0.5 + 0.25
  judge.settle(five, None)  # no reply: free again
  assert run.reserve({"searches": 1, "cost": 0.25})
  run.settle({"searches": 1, "cost": 0.25}, {"searches": 1, "cost": 0.25})
  assert not judge.reserve(five)  # 0.55 + 0.5
  assert judge.reserve(judge_ledger.Usage(0, 2))  # nothing is held of it
  assert not judge.refused
  with pytest.raises(types.Stopped, match=r"run's budget .*0.55 of 1 cost"):
    judge.check()
  assert judge.spent == {"tokens": 2, "cost": pytest.approx(0.3)}
  assert json.loads(path.read_text()) == {
    "searches": 1, "cost": pytest.approx(0.55),
  }  # fmt: skip


def test_a_limit_of_the_judges_own_spends_nothing_of_the_runs():
  run = base.Ledger(cost=1.0)
  judge = judge_ledger.Ledger(judge_ledger.Price(1e6, 1e6), within=run)
  judge.limits["tokens"] = 0
  assert not judge.reserve(judge_ledger.Usage(1, 0))
  assert run.reserve({"cost": 1.0})
  assert not run.refused
  assert "judge's budget" in judge.exceeded()


def test_processes_share_what_is_left():
  limits = {"searches": 11, "cost": 6.0}
  ledgers = [remote.Ledger(limits, (), "run") for _ in range(2)]

  def spend(ledger, searches):
    made, one = 0, {"searches": 1, "cost": 0.5}
    while made < searches and ledger.reserve(one):
      ledger.settle(one, one)
      made += 1
    return made

  def share():
    spent = [ledger.spent for ledger in ledgers]
    for ledger in ledgers:
      ledger.share(limits, spent)

  share()
  assert [spend(one, n) for one, n in zip(ledgers, (9, 1), strict=True)] == [
    5, 1,
  ]  # fmt: skip
  share()  # 5 of 11 are left
  assert [spend(one, 9) for one in ledgers] == [2, 2]
  share()  # one is left, and two could have it
  assert [spend(one, 9) for one in ledgers] == [0, 0]
  alone = remote.Ledger({}, (), "run")
  alone.share(limits, [alone.spent])
  assert alone.limits == limits
