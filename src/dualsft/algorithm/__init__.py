"""The steps of Algorithm 1 as functions of values: models, examples and vectors in, values out.

    line 1   warmup: theta_bar       `train/loop.py: train`, called by `runs/stages/warmup.py`
             the curvature           `gradients.py: adam_rms`
    line 2   the pool                `split.py: divide`, `assign_roles`
    line 3   G                       `gradients.py: pool_gradient`
    line 4   eta_sc                  `projection.py: ProjectionTerms.eta_sc`
    line 5   v_new                   `gradients.py: validation_gradient`
    line 6   v_prior                 `gradients.py: prior_gradient`
    line 7   u                       `projection.py: ProjectionTerms.projection`
    line 8   s_theta                 `projection.py: param_scores`
             s_D, one pass (default) `gradients.py: pool_gradient` makes f_n, with bounds by
                                     `scores.py: one_pass_bounds`
             s_D, two passes         `scores.py: exact_dots`
             s_D, calibrated (ours)  `calibration.py: scored_by_sketches`
    line 9   the mask                `selection.py: choose_entries`, by `topk.py`
    lines 10, 11   the examples      `selection.py: choose_examples`, with `scores.py: judge`;
                                     copies: `duplicates.py: repeated_texts` (ours);
                                     sources, lengths: `quotas.py: make_strata` (ours)
    line 12  restricted fine-tuning  `runs/stages/finetune.py: run`, `train/loop.py: train` with
                                     `train/optimizer.py: SparseAdamW`

The stages of a run (`runs/stages`) and `dualsft.score` and `dualsft.select` call these functions.
Nothing here knows a run folder.
"""
