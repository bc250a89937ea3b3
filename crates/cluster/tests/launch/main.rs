//! Tests of the launcher as a process. With other arguments, this binary is the launcher and its
//! ranks.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ends;
mod flow;
mod group;
mod harness;
mod programs;
mod remote;
mod sshd;

use libtest_mimic::{Arguments, Trial};
use remote::Hosts;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("--as-launcher") => programs::launcher(&arguments[2]),
        Some("--as-rank") => programs::rank(&arguments[2]),
        _ => {}
    }
    const HOSTS: [&str; 2] = ["alpha", "beta"];
    let tests: [(&str, fn()); 26] = [
        ("the_first_failing_ranks_status_is_the_launchers", ends::first_failure),
        ("a_launch_that_succeeds_prints_nothing_itself", ends::success),
        ("a_signal_counts_as_128_and_its_number", ends::signal),
        ("children_of_ranks_are_ended_too", ends::grandchildren),
        ("processes_that_a_successful_rank_leaves_are_ended", ends::leftovers),
        ("a_rank_that_ignores_term_is_killed_after_the_grace_time", ends::stubborn),
        ("a_process_that_left_its_group_does_not_hold_up_the_launcher", ends::escaped),
        ("an_interrupt_ends_all_ranks", ends::interrupt),
        ("a_second_interrupt_does_not_wait", ends::second_interrupt),
        ("ranks_do_not_outlive_a_killed_launcher", ends::launcher_killed),
        ("a_missing_program_is_named", ends::missing_program),
        ("200_000_lines_of_4_ranks_arrive_whole_and_in_order", flow::integrity),
        ("each_rank_has_a_colour_on_a_terminal", flow::colour),
        ("a_last_line_without_newline_is_printed", flow::last_line),
        ("without_prefixes_bytes_are_not_changed", flow::raw),
        ("without_prefixes_a_prompt_is_shown_at_once", flow::prompt),
        ("a_closed_output_ends_the_ranks", flow::output_closed),
        ("input_reaches_the_chosen_ranks", flow::input),
        ("unread_input_does_not_block", flow::unread_input),
        ("an_idle_launcher_uses_no_cpu", flow::idle),
        ("remote_ranks_get_variables_directory_and_input", || remote::surroundings(&Hosts::fake(&HOSTS))),
        ("remote_ranks_are_ended_and_their_status_counts", || remote::ending(Hosts::fake(&HOSTS))),
        ("a_remote_rank_is_ended_before_it_has_a_group", remote::ended_at_once),
        ("a_host_with_job_control_and_without_setsid_works", remote::job_control),
        ("secrets_are_in_no_command_line", remote::secrets),
        ("groups_form_under_every_backend_that_needs_no_devices", group::all_reduce),
    ];
    let over_real_ssh: [(&str, fn()); 2] = [
        ("over_real_ssh_ranks_get_variables_directory_and_input", || {
            remote::surroundings(&Hosts::real(&HOSTS));
        }),
        ("over_real_ssh_ranks_are_ended_and_their_status_counts", || remote::ending(Hosts::real(&HOSTS))),
    ];
    let trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let without_server = !sshd::is_there();
    let over_real_ssh = over_real_ssh.map(|test| trial(test).with_ignored_flag(without_server));
    let trials = tests.map(trial).into_iter().chain(over_real_ssh).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
