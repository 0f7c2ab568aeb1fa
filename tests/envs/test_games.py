"""Test games with several seats: which seat acts, what each seat reads and earns, and that only the
policy's samples are trained on.
"""

from collections import Counter

import pytest
from games import MadeUp, example_address, load_example, play, tokenizer

from rl.envs import demo_generator, generate_demonstrations, resolve_environment
from rl.errors import UserError
from rl.renderers import get_renderer
from rl.rollout import trajectory_to_datums

TOKENIZER = tokenizer()
debates, questions = load_example("debate"), load_example("twenty_questions")


def draw_any_reply(prompt, draw):
    """Return a valid reply for some game, or an invalid one, chosen at random."""
    points = " ".join(draw.sample(debates.MOTIONS[0].points["for"], 2))
    words = ["", "x y", "2: return a + b", "2: return a * b", "yes", "no", "for", "against", points]
    words += [*"123456789", str(draw.randint(1, 16)), *questions.WORDS, *questions.THINGS]
    return draw.choice(words)


def choose_free_cell(prompt, draw):
    """Return a free cell of the last board, and rarely an invalid reply."""
    free = [c for c in shown_last(prompt) if c in "123456789"]
    return draw.choice(free or ["1"]) if draw.random() < 0.97 else "none"


def shown_last(prompt):
    """Return the nine cells of the last board, which may follow an answer without a line break."""
    return "".join(row[-3:] for row in prompt.rsplit("\n", 4)[-4:-1])


def first_free(prompt, draw):
    """Return the first free cell of the last board."""
    return next(c for c in shown_last(prompt) if c in "123456789")


GAMES = [
    ("guess_number", {}, ()),
    ("twenty_questions", {"questions": 5}, ()),
    ("twenty_questions", {"questions": 5, "answerer": "model"}, ("model",)),
    ("tic_tac_toe", {"opponent": "random"}, ()),
    ("tic_tac_toe", {"opponent": "perfect", "plays": "O"}, ()),
    ("tic_tac_toe", {"opponent": "policy"}, ()),
    ("tic_tac_toe", {"opponent": "pool"}, ("pool",)),
    ("debate", {"rounds": 2}, ()),
    ("debate", {"opponent": "pool", "judge": "model"}, ("pool", "model")),
    ("debate", {"opponent": "other", "plays": "for", "judge": "model"}, ("other", "model")),
]


@pytest.mark.parametrize("renderer", ["plain", "role_colon"])
@pytest.mark.parametrize(
    ("name", "settings", "others"),
    GAMES,
    ids=lambda value: str(value) if not isinstance(value, tuple) else "",
)
def test_what_is_trained_is_what_the_policy_sampled_and_nothing_else(
    name, settings, others, renderer
):
    """In random games, every sample of the policy is in exactly one trajectory, and no sample of
    another player is in any.
    """
    words = choose_free_cell if name == "tic_tac_toe" else draw_any_reply
    policy = MadeUp(TOKENIZER, words, version=1, logprob=-1.0)
    players = {
        owner: MadeUp(TOKENIZER, words, version=2 + i, logprob=-2.0)
        for i, owner in enumerate(others)
    }
    renderers = {owner: get_renderer("plain", TOKENIZER) for owner in others if owner != "pool"}
    form = {"renderer": renderer, "players": players, "renderers": renderers}
    result = play(name, policy, groups=4, members=3, **form, **settings)
    assert not result.errors
    for owner, player in players.items():
        assert player.drawn, f"{owner} had no turn"
    trajectories = [item for group in result.groups for item in group.trajectories_G]
    turns = [turn for item in trajectories for turn in item.transitions]
    assert Counter((tuple(t.ob.to_ints()), tuple(t.ac.tokens)) for t in turns) == Counter(
        (tuple(p), tuple(s)) for p, s in policy.drawn
    )
    for trajectory in trajectories:
        turns = trajectory.transitions
        assert {turn.ac.version for turn in turns} == {1}
        assert len({turn.seat for turn in turns}) == 1
        assert [turn.episode_done for turn in turns] == [False] * (len(turns) - 1) + [True]
        trajectory.advantage = 1.0
        fields = [datum.loss_fn_inputs for datum in trajectory_to_datums(trajectory)]
        trained = [
            int(token)
            for item in fields
            for token in item["target_tokens"].array[item["mask"].array != 0]
        ]
        assert trained == [token for turn in turns for token in turn.ac.tokens]
        for item in fields:
            # the policy's logprobs, and 0 at all other positions
            assert (item["logprobs"].array == -item["mask"].array).all()
        if renderer == "plain":  # this renderer always continues the previous tokens
            assert len(fields) == 1


def seats_of(result):
    """Return [(tag, trajectory, match)] with the match that the trajectory's last turn logs."""
    return [
        (group.tag, item, item.transitions[-1].logs["match"])
        for group in result.groups
        for item in group.trajectories_G
    ]


LINES = [{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {1, 4, 7}, {2, 5, 8}, {3, 6, 9}, {1, 5, 9}, {3, 5, 7}]


def replay_moves(match):
    """Return (winner, seat that made an invalid move), derived from the moves only."""
    cells = {"X": set(), "O": set()}
    for move in match:
        text = move["text"]
        if not text.isdigit() or not 1 <= int(text) <= 9 or int(text) in cells["X"] | cells["O"]:
            return None, move["seat"]
        cells[move["seat"]].add(int(text))
        if any(line <= cells[move["seat"]] for line in LINES):
            return move["seat"], None
    assert len(cells["X"] | cells["O"]) == 9
    return None, None


@pytest.mark.parametrize("opponent", ["random", "perfect", "policy", "pool"])
def test_each_seat_of_tic_tac_toe_earns_what_its_game_came_to(opponent):
    policy = MadeUp(TOKENIZER, choose_free_cell, version=1, cut_off=0.0)
    pool = MadeUp(TOKENIZER, choose_free_cell, version=2, cut_off=0.0)
    form = {"groups": 20, "members": 3, "players": {"pool": pool}}
    result = play("tic_tac_toe", policy, opponent=opponent, **form)
    seats = Counter()
    for _, item, match in seats_of(result):
        mark = "XO"[item.transitions[0].seat]
        winner, illegal = replay_moves(match)
        lost = illegal == mark or (winner is not None and winner != mark)
        won = winner == mark or (illegal is not None and illegal != mark)
        rewards = [turn.reward for turn in item.transitions]
        # an invalid move costs its player the game, and earns the other nothing
        expected = -1.0 if lost else float(winner == mark)
        assert rewards == [0.0] * (len(rewards) - 1) + [expected], match
        metrics = item.transitions[-1].metrics
        ends = [metrics[name] for name in ("won", "lost", "drawn", "illegal")]
        assert ends == [won, lost, not winner and not illegal, illegal == mark]
        moves = [move["text"] for move in match if move["seat"] == mark]
        assert [turn.logs["response"] for turn in item.transitions] == moves
        assert opponent != "perfect" or not metrics["won"], "nobody beats it"
        seats[mark] += 1
    if opponent == "policy":
        assert {group.tag for group in result.groups} == {"tic_tac_toe/seat0", "tic_tac_toe/seat1"}
        assert len(result.groups) == 40
        for group in result.groups:
            assert len({t.seat for item in group.trajectories_G for t in item.transitions}) == 1
    else:
        assert min(seats.values()) >= 9  # it plays both seats


def test_a_seat_reads_what_it_is_told_and_not_what_others_are():
    policy = MadeUp(TOKENIZER, lambda prompt, draw: f"say {draw.randint(100, 999)}", 1, cut_off=0.0)
    judge = MadeUp(TOKENIZER, lambda prompt, draw: "against", version=2, cut_off=0.0)
    form = {"players": {"m": judge}, "renderers": {"m": get_renderer("plain", TOKENIZER)}}
    result = play("debate", policy, groups=2, members=2, judge="m", **form)
    for tag, item, match in seats_of(result):
        first, second = match[0]["text"], match[1]["text"]
        read = TOKENIZER.decode(item.transitions[0].ob.to_ints())
        if tag.endswith("/seat0"):
            assert "You speak for it." in read and first not in read and second not in read
            assert item.transitions[-1].reward == -1.0
        else:
            assert "You speak against it." in read and f"for: {first}" in read
            assert second not in read and item.transitions[-1].reward == 1.0
    for prompt, _ in judge.drawn:
        assert "Who argued better" in TOKENIZER.decode(prompt)
        assert "You speak" not in TOKENIZER.decode(prompt)


def test_all_seats_of_all_episodes_are_sampled_together():
    """Each round samples a single batch per player, regardless of the number of games and of whose
    turn it is in each.
    """
    policy, pool = (MadeUp(TOKENIZER, choose_free_cell, version=v, cut_off=0.0) for v in (1, 2))
    form = {"groups": 10, "members": 4, "players": {"pool": pool}}
    result = play("tic_tac_toe", policy, opponent="policy", **form)
    longest = max(len(match) for _, _, match in seats_of(result))
    assert len(policy.calls) == longest <= 9
    policy.calls.clear()
    result = play("tic_tac_toe", policy, opponent="pool", plays="either", **form)
    longest = max(len(match) for _, _, match in seats_of(result))
    assert max(len(policy.calls), len(pool.calls)) <= longest


def test_a_limit_of_turns_cuts_every_seat_short():
    policy = MadeUp(TOKENIZER, first_free, version=1, cut_off=0.0)
    result = play("tic_tac_toe", policy, groups=2, members=2, opponent="policy", turns=3)
    for group in result.groups:
        for item in group.trajectories_G:
            last = item.transitions[-1]
            assert last.episode_done and last.truncated and last.reward == 0.0


@pytest.mark.parametrize(("guess", "correct"), [("7", {0.0, 1.0}), ("no idea", {0.0})])
def test_ends_of_guess_number(guess, correct):
    policy = MadeUp(TOKENIZER, lambda prompt, draw: guess, version=1, cut_off=0.0)
    result = play("guess_number", policy, groups=16, members=1, high=8)
    turns = [item.transitions for group in result.groups for item in group.trajectories_G]
    assert {item[-1].reward for item in turns} == correct and len(turns) == 16
    for item in turns:
        metrics, reward = item[-1].metrics, item[-1].reward
        assert metrics["correct"] == reward and metrics["malformed"] == float(guess == "no idea")
        assert len(item) == metrics["guesses"] == (1 if reward else 4)


@pytest.mark.parametrize(("name", "player", "settings", "moves"), [
    ("guess_number", "halving", {"high": 16}, {1, 2, 3, 4, 5}),
    ("guess_number", "any_number", {"high": 4, "guesses": 50}, None),
    ("twenty_questions", "splitting", {"questions": 5}, {5}),
    ("tic_tac_toe", "perfect", {"opponent": "random"}, None),
    ("tic_tac_toe", "perfect", {"opponent": "policy"}, {9}),
    ("debate", "points", {}, {2}),
])  # fmt: skip
def test_rules_play_the_policys_part_and_win(name, player, settings, moves):
    """The demonstrations are the conversations that the policy would have had, complete for each
    seat.
    """
    spec = resolve_environment(example_address(name), **settings)
    rows, again, others = (
        [row["messages"] for row in generate_demonstrations(spec, player, 30, seed)]
        for seed in (0, 0, 1)
    )
    assert rows == again != others
    for row in rows:
        assert [message["role"] for message in row] == ["user", "assistant"] * (len(row) // 2)
    seats = 2 if settings.get("opponent") == "policy" or name == "debate" else 1
    assert len(rows) == 30 * seats
    renderer = get_renderer("plain", TOKENIZER)
    for row in rows[:20]:
        renderer.build_supervised_example(row)
    games = [rows[start : start + seats] for start in range(0, len(rows), seats)]
    assert moves is None or {sum(len(row) // 2 for row in game) for game in games} <= moves


def test_what_is_asked_for_wrongly_is_named():
    for name, settings, text in [
        ("tic_tac_toe", {"plays": "Z"}, "--environment.plays is one of X, O, either; got 'Z'"),
        ("guess_number", {"low": 5, "high": 4}, "low 5 is above"),
        ("guess_number", {"guesses": 0}, "guesses must be at least 1"),
        ("twenty_questions", {"things": 99}, "things must be from 1 to 16, got 99"),
        ("debate", {"rounds": 0}, "rounds must be at least 1, got 0"),
        (
            "debugging",
            {"levels": ("hard",)},
            "levels is one of operator, bounds, start, compare; got 'hard'",
        ),
        ("debugging", {"tests": 65}, "tests from 1 to 64 .the different calls of these levels"),
        ("debugging", {"levels": ("operator", "bounds"), "tests": 9}, "tests from 1 to 8 "),
    ]:
        with pytest.raises(UserError, match=text):
            resolve_environment(example_address(name), **settings).make()
    with pytest.raises(
        UserError, match="has no rule 'clever' .* it has halving, careless, any_left, any_number"
    ):
        list(generate_demonstrations(resolve_environment("guess_number"), "clever", 1))
    with pytest.raises(UserError, match="tiny:ascii has a seat"):
        list(
            generate_demonstrations(
                resolve_environment("tic_tac_toe", opponent="tiny:ascii"), "random", 1
            )
        )


def test_the_generator_takes_settings_with_spaces_and_names_mistakes(tmp_path, capsys):
    file = tmp_path / "named.py"
    file.write_text(
        "from rl.envs.guess_number_env import GuessNumber\n"
        "class Named(GuessNumber):\n"
        "    def __init__(self, words: str):\n"
        "        super().__init__(high=1)\n"
        '        assert words == "it\'s a game"\n'
    )
    setting = ["--environment.words", "it's a game"]
    demo_generator.main([f"{file}:Named", "any_number", "--episodes", "2", *setting])
    assert len(capsys.readouterr().out.splitlines()) == 2
    for player, words in (("clever", setting), ("any_number", ["--high", "3"])):
        with pytest.raises(SystemExit, match="2"):
            demo_generator.main([f"{file}:Named", player, *words])
    error = capsys.readouterr().err
    assert "has no rule 'clever'" in error and "--high is unknown" in error


def test_random_numbers_are_the_rows_and_not_the_members():
    """Members of a group get the same random numbers of the opponent; groups get different ones."""
    policy = MadeUp(TOKENIZER, lambda prompt, draw: "5", version=1, cut_off=0.0)
    result = play("tic_tac_toe", policy, groups=8, members=3, opponent="random", plays="O")
    openings = [
        [item.transitions[-1].logs["match"][0]["text"] for item in group.trajectories_G]
        for group in result.groups
    ]
    assert all(len(set(group)) == 1 for group in openings)
    assert len({group[0] for group in openings}) > 2
