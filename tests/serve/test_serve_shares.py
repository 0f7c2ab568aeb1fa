"""Test that one rule limits every resource that tenants share."""

import numpy as np
import pytest
from serving import Wire, open_server, server
from test_serve import KEYS

from rl.serve import HttpError
from rl.serve.scheduler import check_share, choose_evictions
from rl.serve.session_store import SamplerRecord


@pytest.mark.parametrize("limit", [2, 7, 64])
def test_whoever_comes_next_finds_room_however_greedy_those_before_are(limit):
    held = {}
    for tenant in range(int(np.log2(limit))):
        held[tenant] = 0
        while True:
            try:
                check_share("things", limit, sum(held.values()), held[tenant], True)
            except HttpError as refused:
                assert refused.status == 429 and refused.retry_after > 0
                break
            held[tenant] += 1
        assert held[tenant] >= 1, held
    assert sum(held.values()) <= limit
    single = 0
    while single < limit:
        check_share("things", limit, single, single, False)
        single += 1
    with pytest.raises(HttpError):
        check_share("things", limit, single, single, False)


def test_who_holds_most_gives_up_first_and_the_oldest_of_it():
    holders = {"a1": "a", "b1": "b", "a2": "a", "a3": "a"}
    assert choose_evictions(holders, 0) == choose_evictions(holders, -3) == []
    assert choose_evictions(holders, 2) == ["a1", "a2"]
    for count in (4, 9):
        assert sorted(choose_evictions(holders, count)) == sorted(holders)
    assert choose_evictions({"b1": "b", "a1": "a"}, 1) == ["b1"], "equals: the oldest of all"


def test_one_key_cannot_take_all_sessions_models_and_open_requests(tmp_path):
    with server(tmp_path, keys=KEYS, sessions=4, models=4, open_requests=6) as first:
        greedy, other = (Wire(first, key) for key in KEYS)
        body = {"json": {"tags": []}}
        answers = [greedy.http.post("/api/v1/create_session", **body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert "your share" in answers[2].text and "--sessions" in answers[2].text
        other.open()
        sessions = [answer.json()["session_id"] for answer in answers[:2]]
        greedy.session = sessions[0]
        bodies = [greedy.model_body(i) | {"session_id": sessions[i % 2]} for i in range(3)]
        answers = [greedy.http.post("/api/v1/create_model", json=body) for body in bodies]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert "--models" in answers[2].text
        assert other.model()
        mine = first.app._keys[0][1]
        first.app._open_by_owner[mine] = 3  # as many requests are open
        refused = greedy.http.get("/api/v1/sessions")
        assert refused.status_code == 429 and "--open-requests" in refused.text
        assert other.http.get("/api/v1/sessions").status_code == 200
        first.app._open_by_owner[mine] = 0
        assert greedy.http.get("/api/v1/sessions").status_code == 200


def test_one_key_cannot_push_anothers_samplers_out(tmp_path):
    with server(tmp_path, keys=KEYS, samplers=6, samplers_in_memory=3) as first:
        careful, greedy = (Wire(first, key) for key in KEYS)
        careful.open(), greedy.open()
        # in memory only: an evicted sampler is lost
        mine = careful.sampler(careful.model(), 1)
        model, samplers = greedy.model(), first.session_store.samplers
        for i in range(8):
            sampler = greedy.sampler(model, 1 + i, number=i)
        assert len(samplers) <= 6 and mine in samplers
        assert sum(result.client is not None for result in samplers.values()) <= 3
        assert careful.sample(mine, 0, [4, 5]).sequences
        assert greedy.sample(sampler, 0, [4, 5]).sequences


def test_a_sampler_that_was_just_made_is_not_the_one_that_is_forgotten(tmp_path):
    with open_server(tmp_path, samplers=1) as (first, wires):
        base = first.engine.settings.bases[0]
        for name in "ab":
            first.session_store.add_sampler(SamplerRecord(name, "local", wires.session, base))
        assert "b" in first.session_store.samplers


def test_the_next_session_without_keys_finds_room_for_its_model(tmp_path):
    with server(tmp_path, models=2) as item:
        first, second = Wire(item), Wire(item)
        first.open(), second.open()
        first.model(0)
        body = first.model_body(1)
        assert first.http.post("/api/v1/create_model", json=body).status_code == 429
        second.model(0)
