"""The messages of scorers. A scorer is a frozen model; it gives the log-probs of tokens.

| from | to | request | answer |
|---|---|---|---|
| rollout_manager, evaluator, gateway | scorer | OpenFlow | stream of TokensScored, CompletionsScored |
| rollout_manager | scorer | ScoreTokens | Done |
"""

from typing import Self

from pydantic import model_validator

from protocols.messages import Float32s, Int32s, Int64s, JobFailed, Message, Name, Several, check_rows


class ScoreTokens(Message):
    """Give the log-probs of the tokens of several rows. `tokens` holds `counts[0]` tokens of row `jobs[0]`, then
    `counts[1]` tokens of row `jobs[1]`, and so on. `scorer`: the name of the model. jobs int64 and counts int32, both
    [rows]; tokens int32 [sum of counts]. TokensScored on the flow bring the answers."""

    flow: int
    scorer: Name
    jobs: Int64s
    counts: Int32s
    tokens: Int32s

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_rows(self.jobs, self.counts, self.tokens)
        return self


class TokensScored(Message):
    """Log-probs of the tokens of several rows, columns as in ScoreTokens. `logprobs`: float32, of every token of a row
    but the first, given the tokens before. `top_tokens`, `top_logprobs`: the k likeliest tokens in place of each token,
    and their log-probs; k may be 0."""

    jobs: Int64s
    counts: Int32s
    logprobs: Float32s
    top_tokens: Int32s
    top_logprobs: Float32s
    failed: Several[JobFailed] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_rows(self.jobs, self.counts, self.logprobs)
        if self.top_tokens.shape != self.top_logprobs.shape or len(self.top_tokens) % max(1, len(self.logprobs)):
            raise ValueError("the columns of likely tokens are not as long as those of log-probs, or a multiple")
        return self
