"""torchtitan's config: its trainer reads the rows of `cseq.tokens`."""

from torchtitan.models.llama3 import config_registry as llama3

from cseq import tokens
from cseq.adapters.torchtitan import TokenDataLoader


def rows(length):
    # There are two files, .idx and .bin.
    web = tokens.Megatron("web_text_document")
    # Token 0 ends a text.
    code = tokens.Flat("code.bin", dtype="uint16", end=0)
    return tokens.Rows({"web": web, "code": code}, length)


def pretrain():
    config = llama3.llama3_debugmodel()
    config.dataloader = TokenDataLoader.Config(rows=rows, num_workers=2, seed=7)
    return config
