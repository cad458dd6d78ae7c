"""Going parallel: gradient synchronisation and sharding for any nn.Module, usable alone.

Usage, under torchrun:

    from trainstep.parallel.ddp_bucketed import BucketedDDP
    from trainstep.parallel.process_group import start_ranks, stop_ranks

    ranks = start_ranks()
    model.to(ranks.device)
    sync = BucketedDDP(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:    # as many on every rank: unequal numbers end the job with an error that says so
        model(**batch).backward()
        sync.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    del sync, optimizer, model
    stop_ranks(ranks)    # whoever ends without it counts as dead, and the others leave
"""
