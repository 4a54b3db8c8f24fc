"""pytest plugin: torchdata's own tests run with cseq's reading service in the place of theirs."""

import torchdata.dataloader2
from torchdata.dataloader2 import reading_service

from cseq.adapters.torchdata import MultiProcessingReadingService

for module in (torchdata.dataloader2, reading_service):
    module.MultiProcessingReadingService = MultiProcessingReadingService
