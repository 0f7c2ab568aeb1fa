"""List the loss kinds and metrics of `policy_loss` in the order of the kernels."""

KINDS = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
METRICS = ("loss", "tokens", "clipped_low", "clipped_high")
