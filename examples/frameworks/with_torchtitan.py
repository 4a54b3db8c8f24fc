"""torchtitan's config: its trainer reads the rows of `cseq.tokens`."""

from torchtitan.models.llama3 import config_registry as llama3

from cseq import tokens
from cseq.adapters.torchtitan import TokenDataLoader


def rows(length):
    web = tokens.Megatron("web_text_document")  # .idx and .bin
    code = tokens.Flat("code.bin", dtype="uint16", end=0)  # the token that ends a text
    return tokens.Rows({"web": web, "code": code}, length)


def pretrain():
    config = llama3.llama3_debugmodel()
    config.dataloader = TokenDataLoader.Config(rows=rows, num_workers=2, seed=7)
    return config
