"""List the loss kinds, KL kinds and metrics of `policy_loss` in the order of the kernels."""

KINDS = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
KL_KINDS = ("k1", "k2", "k3")
METRICS = ("loss", "tokens", "ratio", "clipped_low", "clipped_high", "kl_v1", "kl_v2", "kl_ref")
