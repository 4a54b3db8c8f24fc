"""A pytest plugin that runs torchdata's own tests with cseq's reading service."""

import torchdata.dataloader2
from torchdata.dataloader2 import reading_service

from cseq.adapters.torchdata import MultiProcessingReadingService

for module in (torchdata.dataloader2, reading_service):
    module.MultiProcessingReadingService = MultiProcessingReadingService
