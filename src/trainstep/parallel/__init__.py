"""Going parallel: gradient synchronisation and sharding for any nn.Module, usable alone.

Usage, under torchrun:

    ranks = start_ranks()
    sync = BucketedDDP(model, ranks)
    for batch in batches:
        model(**batch).backward()
        sync.finish_gradient_synchronization()
        optimizer.step()
        sync.zero_grad()
    stop_ranks(ranks)
"""
