"""Train a tiny model on two-digit addition with a custom RL loop that uses only the client API.

    accelerate launch minimal_loop.py        (or: python minimal_loop.py [--steps 40])

This is the whole algorithm; train.py adds settings, evaluation, checkpoints and curves around the
same five steps.
"""

import argparse
import random

from rl import ServiceClient, renderers, types


def sample_problem(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"{a}+{b}=", str(a + b)


def fine_tune(client, renderer, rng: random.Random, steps: int) -> None:
    """Fine-tune on answers with frequent wrong digits: the model learns sums, but is often
    inaccurate.
    """
    for _ in range(steps):
        data = []
        for _ in range(256):
            question, answer = sample_problem(rng)
            if rng.random() < 0.7:
                i = rng.randrange(len(answer))
                answer = answer[:i] + str(rng.randint(0, 9)) + answer[i + 1 :]
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            model_input, weights = renderer.build_supervised_example(chat)
            tokens = model_input.to_ints()
            inputs = {"target_tokens": tokens[1:], "weights": weights[1:]}
            data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
        client.forward_backward(data, "cross_entropy", divisor=1024)
        client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()


def main(sft_steps: int, steps: int, problems: int = 64, group: int = 8, seed: int = 0) -> float:
    rng = random.Random(seed)
    service = ServiceClient(seed=seed)
    client = service.create_full_training_client("tiny:addition")
    renderer = renderers.get_renderer("plain", client.get_tokenizer())
    params = types.SamplingParams(max_tokens=4, stop=renderer.get_stop_sequences())
    fine_tune(client, renderer, rng, sft_steps)
    mean = 0.0
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client()
        batch = [sample_problem(rng) for _ in range(problems)]
        prompts = [
            renderer.build_generation_prompt([{"role": "user", "content": question}])
            for question, _ in batch
        ]
        # 1. sample (all prompts run as a single batch)
        futures = [sampler.sample(prompt, group, params) for prompt in prompts]
        data, rewards = [], []
        for (_, answer), prompt, future in zip(batch, prompts, futures, strict=True):
            sequences = future.result().sequences
            # 2. evaluate
            scores = [
                float(renderer.parse_response(s.tokens)[0]["content"] == answer) for s in sequences
            ]
            advantages = [score - sum(scores) / group for score in scores]  # 3. advantage
            rewards += scores
            if not any(advantages):
                continue
            for sequence, advantage in zip(sequences, advantages, strict=True):  # 4. prepare
                tokens, zeros = prompt.to_ints() + sequence.tokens, [0.0] * (prompt.length - 1)
                inputs = {
                    "target_tokens": tokens[1:],
                    "logprobs": zeros + sequence.logprobs,
                    "advantages": zeros + [advantage] * len(sequence.tokens),
                }
                data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
        # 5. train; the divisor only scales the gradient, to which Adam is nearly indifferent
        client.forward_backward(
            data, "ppo", divisor=max(1, sum(len(d.model_input.to_ints()) for d in data))
        )
        client.optim_step(types.AdamParams(learning_rate=3e-4, grad_clip_norm=1.0)).result()
        mean = sum(rewards) / len(rewards)
        print(
            f"step {step:3d}  reward {mean:.3f}  groups with signal {len(data) // group}/{problems}"
        )
    service.close()
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sft-steps", type=int, default=400, help="supervised steps before the loop"
    )
    parser.add_argument("--steps", type=int, default=40, help="reinforcement learning steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, problems and samples")
    args = parser.parse_args()
    main(args.sft_steps, args.steps, seed=args.seed)
