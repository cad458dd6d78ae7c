"""Going parallel: gradient synchronisation and sharding for any nn.Module, usable alone.

Usage, under torchrun:

    ranks = start_ranks()
    sync = BucketedDDP(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        model(**batch).backward()
        sync.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    del sync, optimizer, model
    stop_ranks(ranks)
"""
