"""Slow, obvious twins of the fast paths: one token at a time, no cache, straight from the papers."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Array, list[Array]]:
    """Outputs ``[B, H, T, V]`` and the ``T + 1`` states ``[B, H, K, V]`` after 0, 1, ..., T tokens, in float64.

    Gated Delta Networks (arXiv 2412.06464), transposed: S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T and
    o_t = S_t^T q_t.
    """
    q, k, v, g, b = (x.double().numpy() for x in (query, key, value, log_decay, beta))
    batch, heads, tokens, key_size = k.shape
    outputs = np.zeros(v.shape)
    states = _states(state, (tokens + 1, batch, heads, key_size, v.shape[-1]))
    for row in range(batch):
        for head in range(heads):
            for t in range(tokens):
                key_t, strength = k[row, head, t], b[row, head, t]
                forget = np.eye(key_size) - strength * np.outer(key_t, key_t)
                kept = np.exp(g[row, head, t]) * forget @ states[t, row, head]
                states[t + 1, row, head] = kept + strength * np.outer(key_t, v[row, head, t])
                outputs[row, head, t] = states[t + 1, row, head].T @ q[row, head, t]
    return outputs, list(states)


def kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Array, list[Array]]:
    """Outputs ``[B, H, T, V]`` and the ``T + 1`` states ``[B, H, K, V]`` after 0, 1, ..., T tokens, in float64.

    Kimi Linear (arXiv 2510.26692): S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T and o_t = S_t^T q_t,
    with a_t a vector over the key's channels: ``log_decay [B, H, T, K]``.
    """
    q, k, v, g, b = (x.double().numpy() for x in (query, key, value, log_decay, beta))
    batch, heads, tokens, key_size = k.shape
    outputs = np.zeros(v.shape)
    states = _states(state, (tokens + 1, batch, heads, key_size, v.shape[-1]))
    for row in range(batch):
        for head in range(heads):
            for t in range(tokens):
                key_t, strength = k[row, head, t], b[row, head, t]
                forget = np.eye(key_size) - strength * np.outer(key_t, key_t)
                kept = forget @ np.diag(np.exp(g[row, head, t])) @ states[t, row, head]
                states[t + 1, row, head] = kept + strength * np.outer(key_t, v[row, head, t])
                outputs[row, head, t] = states[t + 1, row, head].T @ q[row, head, t]
    return outputs, list(states)


def state_space_duality(
    inputs: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None
) -> tuple[Array, list[Array]]:
    """Outputs ``[B, H, T, P]`` and the ``T + 1`` states ``[B, H, P, N]`` after 0, 1, ..., T tokens, in float64.

    Mamba-2 (arXiv 2405.21060): h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T and y_t = h_t C_t, one A for each head;
    consecutive heads share the B and C of their group (``[B, G, T, N]``).
    """
    x, dt, a, b, c = (x.double().numpy() for x in (inputs, step, rate, write, read))
    batch, heads, tokens, size = x.shape
    outputs = np.zeros(x.shape)
    states = _states(state, (tokens + 1, batch, heads, size, b.shape[-1]))
    heads_per_group = heads // b.shape[1]
    for row in range(batch):
        for head in range(heads):
            group = head // heads_per_group
            for t in range(tokens):
                kept = np.exp(dt[row, head, t] * a[head]) * states[t, row, head]
                added = dt[row, head, t] * np.outer(x[row, head, t], b[row, group, t])
                states[t + 1, row, head] = kept + added
                outputs[row, head, t] = states[t + 1, row, head] @ c[row, group, t]
    return outputs, list(states)


def selective_scan(
    inputs: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, state: Tensor | None
) -> tuple[Array, list[Array]]:
    """Outputs ``[B, I, T]`` and the ``T + 1`` states ``[B, I, N]`` after 0, 1, ..., T tokens, in float64.

    Mamba (arXiv 2312.00752): h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t and y_t = C_t h_t for each channel, with a row of
    ``rate [I, N]`` as the diagonal of its A.
    """
    x, dt, a, b, c = (x.double().numpy() for x in (inputs, step, rate, write, read))
    batch, channels, tokens = x.shape
    outputs = np.zeros(x.shape)
    states = _states(state, (tokens + 1, batch, *a.shape))
    for row in range(batch):
        for channel in range(channels):
            for t in range(tokens):
                kept = np.exp(dt[row, channel, t] * a[channel]) * states[t, row, channel]
                states[t + 1, row, channel] = kept + dt[row, channel, t] * b[row, t] * x[row, channel, t]
                outputs[row, channel, t] = c[row, t] @ states[t + 1, row, channel]
    return outputs, list(states)


def lightning_attention(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor | None
) -> tuple[Array, list[Array]]:
    """Outputs ``[B, H, T, V]`` and the ``T + 1`` states ``[B, H, K, V]`` after 0, 1, ..., T tokens, in float64.

    Lightning Attention-2 (arXiv 2401.04658), which MiniMax-01 (arXiv 2501.08313) uses: kv_t = lambda kv_{t-1} + k_t
    v_t^T and o_t = kv_t^T q_t; here lambda may differ by token.
    """
    q, k, v, g = (x.double().numpy() for x in (query, key, value, log_decay))
    batch, heads, tokens, key_size = k.shape
    outputs = np.zeros(v.shape)
    states = _states(state, (tokens + 1, batch, heads, key_size, v.shape[-1]))
    for row in range(batch):
        for head in range(heads):
            for t in range(tokens):
                kept = np.exp(g[row, head, t]) * states[t, row, head]
                states[t + 1, row, head] = kept + np.outer(k[row, head, t], v[row, head, t])
                outputs[row, head, t] = states[t + 1, row, head].T @ q[row, head, t]
    return outputs, list(states)


def real_gated_linear_recurrence(inputs: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Array, list[Array]]:
    """Outputs ``[B, T, W]`` and the ``T + 1`` states ``[B, W]`` after 0, 1, ..., T tokens, in float64.

    Griffin (arXiv 2402.19427): h_t = a_t h_{t-1} + x_t for each channel, with x_t the input after gate and scale; the
    output is h_t.
    """
    x, a = inputs.double().numpy(), decay.double().numpy()
    batch, tokens, width = x.shape
    states = _states(state, (tokens + 1, batch, width))
    for t in range(tokens):
        for row in range(batch):
            for channel in range(width):
                states[t + 1, row, channel] = a[row, t, channel] * states[t, row, channel] + x[row, t, channel]
    return states[1:].transpose(1, 0, 2), list(states)


def _states(first: Tensor | None, shape: tuple[int, ...]) -> Array:
    """Room for ``shape[0]`` states; the first is ``first``, or zeros."""
    states = np.zeros(shape)
    if first is not None:
        states[0] = first.double().numpy()
    return states


def causal_convolution(window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Array:
    """Depthwise convolution of ``window [B, C, kernel + T]``, one input at a time: the last T outputs, in float64."""
    inputs, weights = window.double().numpy(), weight.double().numpy()
    kernel = weights.shape[-1]
    outputs = []
    for end in range(kernel + 1, inputs.shape[-1] + 1):
        output = (inputs[..., end - kernel : end] * weights).sum(-1)
        if bias is not None:
            output = output + bias.double().numpy()
        outputs.append(output / (1 + np.exp(-output)) if silu else output)
    return np.stack(outputs, -1)


@torch.no_grad()
def next_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits ``[len(tokens), vocab]`` of a whole sequence from scratch: no cache, no state, nothing to roll back."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


class GreedyRun(NamedTuple):
    """Generated tokens, and the drafted and accepted numbers of each step."""

    tokens: list[int]
    steps: list[tuple[int, int]]


def speculate_greedily(target: nn.Module, draft: nn.Module, prompt: list[int], k: int, count: int) -> GreedyRun:
    """The speculative loop without any cache: every logit comes from a pass over the whole sequence."""
    tokens, steps = list(prompt), []
    while (left := count - len(tokens) + len(prompt)) > 0:
        drafted: list[int] = []
        for _ in range(min(k, left - 1)):
            drafted.append(int(next_logits(draft, tokens + drafted)[-1].argmax()))
        choices = next_logits(target, tokens + drafted)[len(tokens) - 1 :].argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != choices[i]), len(drafted))
        tokens += [*drafted[:accepted], choices[accepted]]
        steps.append((len(drafted), accepted))
    return GreedyRun(tokens[len(prompt) :], steps)


def rejection_sampling(p: Array, q: Array, drafted: list[int], uniforms: list[float]) -> tuple[int, Array]:
    """Algorithm 1 of arXiv 2211.17192: the number accepted, and the distribution of the token that follows."""
    for i, x in enumerate(drafted):
        if uniforms[i] < min(1.0, p[i, x] / q[i, x]):
            continue
        residual = np.maximum(0.0, p[i] - q[i])
        return i, residual / residual.sum()
    return len(drafted), p[len(drafted)]


def block_verification(p: Array, q: Array, drafted: list[int], uniforms: list[float]) -> tuple[int, Array]:
    """arXiv 2403.10444, algorithm 2, straight from its sums: tokens kept, and the distribution of what follows them."""
    count, kept = len(drafted), 0
    weights = [1.0]
    for i in range(count):
        weights.append(min(weights[-1] * p[i, drafted[i]] / q[i, drafted[i]], 1.0))
    for i in range(1, count + 1):
        if i == count:
            chance = weights[i]
        else:
            rest = sum(max(weights[i] * p[i, x] - q[i, x], 0.0) for x in range(p.shape[1]))
            chance = rest / (rest + 1 - weights[i]) if rest else 0.0
        if uniforms[i - 1] < chance:
            kept = i
    if kept == count:
        return kept, p[count]
    follower = np.maximum(weights[kept] * p[kept] - q[kept], 0)
    return kept, follower / follower.sum() if follower.sum() else p[kept]


def looked_up(tokens: list[int], k: int, longest: int, shortest: int, window: int) -> list[int]:
    """Prompt lookup by comparing every place: the longest n-gram, then the latest place, what follows it copied."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            near = not window or len(tokens) - end <= window
            if n <= len(tokens) and near and tokens[end - n : end] == tokens[len(tokens) - n :]:
                copied = list(tokens)
                for i in range(k):
                    copied.append(copied[end + i])
                return copied[len(tokens) :]
            if window and not near:
                break
    return []


def warped(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Array:
    """The distribution of one token: temperature, then the k likeliest, then the smallest set that reaches mass p."""
    scores = logits.double().numpy() / temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    kept = order[: top_k or len(order)]
    inside = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    if top_p is not None:
        kept = kept[: int(np.searchsorted(inside, top_p)) + 1]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


class Drafted(NamedTuple):
    """A step as a draft-length rule sees it: counts, and seconds of its parts."""

    drafted: int
    accepted: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0


def entropy(probabilities: list[float]) -> float:
    """In nats."""
    return -sum(q * np.log(q) for q in probabilities if q > 0)


def acceptance_by_position(steps: list[Drafted], longest: int, fade: float, prior: float, weight: float) -> list[float]:
    """P(position j accepted) as a product of conditional shares, each with ``weight`` steps of the share before."""
    drafting = [step for step in steps if step.drafted]
    rates, before, product = [], prior, 1.0
    for j in range(1, longest + 1):
        seen = accepted = 0.0
        for age, step in enumerate(reversed(drafting)):
            if step.drafted >= j and step.accepted >= j - 1:
                seen += fade**age
                accepted += fade**age * (step.accepted >= j)
        before = (accepted + weight * before) / (seen + weight)
        product *= before
        rates.append(product)
    return rates


def seconds_by_length(times: list[tuple[int, float]], longest: int, window: int, origin: float) -> list[float]:
    """Medians of the last 16 times of each length among the last ``window``, each mixed with a line worth 4 times."""
    recent = times[-window:]
    medians, counts = {}, {}
    for length in {length for length, _ in recent}:
        own = [seconds for other, seconds in recent if other == length][-16:]
        medians[length], counts[length] = float(np.median(own)), len(own)
    lengths = sorted(medians)
    y, weights = np.array([medians[k] for k in lengths]), np.array([counts[k] for k in lengths])
    one = len(lengths) == 1
    slope = max(0.0, (y[0] - origin) / lengths[0] if one else np.polyfit(lengths, y, 1, w=np.sqrt(weights))[0])
    start = np.average(y, weights=weights) - slope * np.average(lengths, weights=weights)
    mixed = []
    for k in range(1, longest + 1):
        count = counts.get(k, 0)
        mixed.append((count * medians.get(k, 0.0) + 4 * (start + slope * k)) / (count + 4))
    return mixed


def seconds_of_steps(steps: list[Drafted], longest: int, window: int, by_position: list[float]) -> list[float]:
    """Of a step that drafts 0 to ``longest`` tokens: draft, verify pass, commit weighted by the chance of a rollback.

    Draft times right after a step without drafted tokens do not count.
    """
    plain = [step.verify_seconds + step.commit_seconds for step in steps if not step.drafted][-16:]
    drafting = [step for step in steps if step.drafted]
    whole = [step.commit_seconds for step in drafting if step.accepted == step.drafted][-16:]
    partial = [step.commit_seconds for step in drafting if step.accepted < step.drafted][-16:]
    untroubled = [s for i, s in enumerate(steps) if s.drafted and (i == 0 or steps[i - 1].drafted)]
    start = float(np.median(plain)) if plain else 0.0
    verify = seconds_by_length([(s.drafted, s.verify_seconds) for s in drafting], longest, window, start)
    draft = seconds_by_length([(s.drafted, s.draft_seconds) for s in untroubled], longest, window, 0.0)
    all_kept, some_kept = float(np.median(whole or partial)), float(np.median(partial or whole))
    commit = [kept * all_kept + (1 - kept) * some_kept for kept in by_position]
    first = start if plain else verify[0] + all_kept
    return [first, *(sum(parts) for parts in zip(draft, verify, commit, strict=True))]


def confidence_bounds(
    steps: list[tuple[int, Drafted]], arms: list[int], exploration: float, discount: float
) -> list[float]:
    """Score of each arm after ``(arm, step)`` pairs, by the formula: discounted UCB on tokens per second."""
    tokens, seconds, counts = (dict.fromkeys(arms, 0.0) for _ in range(3))
    for age, (arm, step) in enumerate(reversed(steps)):
        tokens[arm] += discount**age * (1 + step.accepted)
        seconds[arm] += discount**age * (step.draft_seconds + step.verify_seconds + step.commit_seconds)
        counts[arm] += discount**age
    rates = {arm: tokens[arm] / seconds[arm] for arm in arms}
    explored = np.log(max(1.0, sum(counts.values())))
    return [rates[arm] / max(rates.values()) + exploration * np.sqrt(explored / counts[arm]) for arm in arms]
