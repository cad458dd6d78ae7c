"""Which tests of a large family run with `make test`; the others run with `make test-slow`.

A family is a test function with its parameters. Where some parameters stand for the others, the test marks the rest with
`slow_unless`. Where none does, SAMPLED says how many of the family are taken, evenly spaced.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

SAMPLED: Mapping[str, int] = {
    "cli/test_attention.py::test_both_names_run_the_same_implementation": 1,
    "cli/test_profile_nsys.py::test_a_failure_of_nsys_is_one_sentence": 2,
    "cli/test_profile_nsys.py::test_bad_input_is_refused_in_one_sentence": 5,
    "cli/test_sweep.py::test_a_closed_pipe_ends_no_sweep": 1,
    "cli/test_sweep.py::test_ctrl_c_keeps_what_is_finished": 1,
    "costs/test_gradient_sync.py::test_a_step_sends_what_the_formula_says": 20,
    "measure/attention/test_tiles.py::test_the_check_sees_what_is_wrong": 1,
    "measure/harness/test_cell.py::test_a_failure_is_the_answer": 4,
    "measure/harness/test_connection.py::test_grandchildren_die_with_a_lost_cell": 3,
    "measure/harness/test_fork_server.py::test_a_killed_driver_leaves_nothing": 1,
    "measure/harness/test_fork_server.py::test_the_failure_says_how_a_forked_cell_died": 3,
    "measure/harness/test_interleave.py::test_a_lost_variant_leaves_the_others_running": 3,
    "measure/harness/test_interleave.py::test_killed_rounds_resume_where_they_stopped": 1,
    "measure/harness/test_rank_connection.py::test_an_error_of_one_rank_names_the_rank": 2,
    "measure/harness/test_rank_connection.py::test_the_death_of_one_rank_names_the_rank": 2,
    "measure/memory/test_tables_ranks.py::test_categories_are_the_formulas_to_the_byte": 2,
    "measure/memory/test_tables_ranks.py::test_options_of_a_step_are_accounted_for": 2,
    "measure/memory/test_workload.py::test_every_mode_and_option_is_accounted_for": 3,
    "measure/memory/test_workload.py::test_the_step_that_is_captured_is_recorded": 1,
    "measure/parallel/test_collective.py::test_copies_give_what_the_library_gives": 4,
    "measure/parallel/test_workload.py::test_a_captured_cell_says_what_was_captured_and_has_no_trace": 2,
    "measure/parallel/test_workload.py::test_every_strategy_is_timed_counted_and_traced": 2,
    "measure/parallel/test_workload.py::test_fsdp_may_compute_in_bf16": 1,
    "measure/run/changed/test_attention.py::test_a_compiled_model_of_hugging_face_attends_without_its_mask": 1,
    "measure/run/test_watch.py::test_losses_are_the_same_to_the_bit": 5,
    "measure/step/test_recompute_budget.py::test_no_step_holds_more_than_its_budget_and_larger_budgets_add_less": 1,
    "measure/step/test_recompute_budget.py::test_the_prediction_is_what_a_step_holds": 1,
    "ops/flash_attention/hopper/test_kernels.py::test_cases": 4,
    "ops/flash_attention/hopper/test_kernels.py::test_cases_of_two_parts": 3,
    "ops/flash_attention/test_hugging_face.py::test_a_model_compiles_as_one_graph": 1,
    "parallel/checkpoint/test_save_load.py::test_training_resumes_on_another_number_of_ranks": 1,
    "parallel/liveness/test_watch.py::test_a_clean_end_prints_nothing": 1,
    "parallel/liveness/test_watch.py::test_a_killed_rank_is_named": 2,
    "parallel/liveness/test_watch.py::test_a_rank_that_is_stuck_is_named_by_those_that_time_out": 1,
    "parallel/liveness/test_watch.py::test_an_exception_is_printed_by_its_own_rank_alone": 1,
    "parallel/liveness/test_watch.py::test_an_exception_that_stops_the_ranks_on_its_way_is_printed": 1,
    "parallel/liveness/test_watch.py::test_unequal_numbers_of_batches_are_refused_at_once": 1,
    "parallel/test_fsdp.py::test_blocks_may_be_compiled_or_checkpointed": 1,
    "parallel/test_gradient_sync.py::test_wrapped_objects_that_a_program_drops_are_freed": 3,
    "parallel/test_held_tensors.py::test_a_strategy_reports_all_tensors_that_it_holds": 2,
    "parallel/test_master_weights.py::test_training_goes_on_from_a_saved_state": 12,
    "parallel/test_module_wrapper.py::test_a_wrapper_trains_and_has_the_modules_state": 6,
    "parallel/test_parity.py::test_reducing_in_bf16_is_as_good_as_rounding_gradients": 7,
    "parallel/test_parity.py::test_training_is_as_good_as_in_one_process": 26,
    "parallel/test_parity.py::test_two_ranks_train_as_one_process_to_the_bit": 20,
    "parallel/test_sharded_flat.py::test_small_blocks_share_messages_with_their_neighbours": 3,
    "parallel/test_sharded_optimizer.py::test_resumed_training_equals_uninterrupted_training": 2,
    "plan/test_activations.py::test_kept_bytes_are_those_of_fake_tensors": 2,
    "plan/test_peak_memory.py::test_bytes_with_an_update_in_backward_are_the_formulas": 4,
    "plan/test_peak_memory.py::test_bytes_with_masters_are_the_formulas": 6,
    "plan/test_peak_memory.py::test_tensors_of_a_real_step_have_the_formulas_bytes": 6,
    "plan/test_step_memory.py::test_backward_peaks_where_fake_tensors_do": 2,
    "plan/test_step_memory.py::test_peaks_of_a_file_are_those_of_h200s": 2,
    "plan/test_traced_kernels.py::test_a_trace_of_the_built_in_model_takes_as_long_as_its_formulas_say": 2,
    "report/kit/test_terminal.py::test_every_verb_with_tables_has_the_option_all": 3,
    "report/test_answers.py::test_every_format_begins_with_the_answer": 4,
    "report/test_partial_records.py::test_a_record_without_one_of_its_parts_is_refused_or_reported": 4,
    "report/test_report_verb.py::test_text_that_cannot_be_encoded_breaks_no_report": 2,
    "traces/test_communication.py::test_a_trace_has_the_messages_of_the_formula": 2,
    "traces/test_profile.py::test_time_is_linear_in_events": 1,
    "traces/test_snapshot.py::test_files_that_take_all_memory_or_crash_are_refused": 1,
    "traces/test_snapshot.py::test_hostile_pickles_end_in_a_sentence": 5,
    "training/test_captured.py::test_a_captured_step_has_the_same_losses": 4,
    "training/test_captured_ranks.py::test_a_captured_strategy_has_the_same_losses_and_weights": 4,
    "training/test_captured_ranks.py::test_messages_by_copies_change_nothing": 4,
    "training/test_parallelism.py::test_masters_are_trained_by_every_strategy_that_keeps_whole_parameters": 6,
    "training/test_recompute.py::test_a_captured_step_recomputes": 3,
    "training/test_recompute.py::test_recomputing_changes_no_loss_and_no_gradient": 9,
    "training/test_update_in_backward.py::test_buckets_are_updated_behind_their_messages_as_by_the_plain_step": 3,
}
"""Family, by its path under tests/ -> how many of it `make test` runs."""


def slow_unless(is_quick: Callable[..., bool], values: Iterable[Any]) -> list[Any]:
    """Each value as a parameter, marked slow unless it is quick; of a tuple `is_quick` gets the items."""
    params = []
    for value in values:
        items = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*items, marks=() if is_quick(*items) else pytest.mark.slow))
    return params


def mark_family(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what SAMPLED does not take of a family, given whole. Tests that are slow or need a GPU anyway do not count."""
    taken = SAMPLED.get(items[0].nodeid.partition("[")[0].removeprefix("tests/")) if items else None
    if taken is not None:
        family = [item for item in items if not any(map(item.get_closest_marker, ("slow", "gpu", "multigpu")))]
        for index, item in enumerate(family):
            if index * taken // len(family) == (index - 1) * taken // len(family):
                item.add_marker(pytest.mark.slow)
