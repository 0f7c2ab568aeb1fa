"""Build tokenizers of single characters."""

from transformers import PreTrainedTokenizerFast


def character_tokenizer(vocabulary, *, unknown=None, begin=None, **special):
    """Return a tokenizer of these tokens. `begin` is the token that it puts before each text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ids = {token: i for i, token in enumerate(vocabulary)}
    core = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if begin:
        core.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, ids[begin])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)
