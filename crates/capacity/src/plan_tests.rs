//! Questions and their answers.

use super::*;

fn question(model: &str, machine: &str, count: usize, users: u32) -> Question {
    let json = json!({
        "model": model, "machines": [{ "machine": machine, "count": count }], "users": users,
        "requests_per_user_day": 40, "prompt_tokens": 1200, "cached_share": 0.5, "answer_tokens": 300,
    });
    Question::read(json.to_string().as_bytes()).expect("a question")
}

#[test]
fn four_ultras_hold_deepseek_and_one_mini_does_not() {
    let large = plan(&question("deepseek-v3", "m3-ultra-512", 4, 100)).expect("an answer");
    assert_eq!(large.layouts.len(), 3, "{large:?}");
    assert!(large.layouts.iter().skip(1).all(|layout| layout.fits), "{large:?}");
    let [one, tensor, ..] = &large.layouts[..] else { panic!("{large:?}") };
    assert!(tensor.decode_tokens_s > one.decode_tokens_s && tensor.kv_tokens > 100_000, "{large:?}");
    assert!(large.load.is_some() && large.money.is_none(), "{large:?}");
    let small = plan(&question("deepseek-v3", "m4-pro-64", 2, 100)).expect("an answer");
    assert!(small.chosen.is_none() && small.why.is_some_and(|why| why.contains("fewer bits")));
}

#[test]
fn more_users_get_less_until_there_are_too_many() {
    let few = plan(&question("llama-8b", "m4-max-64", 1, 5)).expect("an answer");
    let most = few.most_users.expect("some users");
    assert!(few.load.as_ref().is_some_and(|load| load.simulated.meets_goal), "{few:?}");
    let beyond = plan(&question("llama-8b", "m4-max-64", 1, 2 * most)).expect("an answer");
    assert!(beyond.load.is_some_and(|load| !load.simulated.meets_goal), "{most}");
    assert_eq!(few, plan(&question("llama-8b", "m4-max-64", 1, 5)).expect("an answer"), "it repeats");
}

#[test]
fn what_makes_no_sense_is_named() {
    let wrong = |change: fn(&mut Question)| {
        let mut question = question("llama-8b", "m4-max-64", 1, 5);
        change(&mut question);
        plan(&question).expect_err("refused").to_string()
    };
    assert!(wrong(|question| question.peak = f64::NAN).contains("peak is NaN"));
    assert!(wrong(|question| question.machines.clear()).contains("machines is 0"));
    assert!(wrong(|question| question.machines[0].machine = "m9".into()).contains("m4-pro-48"));
    assert!(wrong(|question| question.model = "gpt-9".into()).contains("use a folder"));
    assert!(wrong(|question| question.link = "string".into()).contains("thunderbolt5-rdma"));
    assert!(wrong(|question| question.layout = Some("ring".into())).contains("one machine"));
    assert!(
        wrong(|question| question.money.currency = "<b>".into())
            .contains("money.currency is \"<b>\": use three")
    );
    assert!(wrong(|question| question.money.api_input = Some(-1.0)).contains("money.api_input is -1"));
    let unknown = Question::read(br#"{"model":"x","mood":1}"#).expect_err("refused").to_string();
    assert!(unknown.contains("mood"), "{unknown}");
}

#[test]
fn power_and_energy_need_no_price_and_a_machine_of_several_kinds_is_named() {
    let mut question = question("llama-8b", "m4-pro-64", 1, 5);
    question.machines.push(Machines { machine: "m3-ultra-512".into(), count: 2 });
    let answer = plan(&question).expect("an answer");
    assert_eq!(answer.layouts[0].layout, "one machine (m3-ultra-512)", "{:?}", answer.layouts);
    let energy = answer.energy.expect("there is a layout");
    assert!(answer.money.is_none() && energy.idle_watts == 5.0 + 2.0 * 9.0, "{energy:?}");
    assert!((energy.idle_watts..=energy.busy_watts).contains(&energy.mean_watts), "{energy:?}");
    let kwh = energy.mean_watts * 730.5 / 1000.0;
    assert!((energy.kwh_month - kwh).abs() < 1e-6 && (energy.kwh_user_month - kwh / 5.0).abs() < 1e-6);
    assert!(energy.joules_token.is_some_and(|joules| joules > 0.0), "{energy:?}");
    for name in ["one machine", "one machine (m3-ultra-512)"] {
        question.layout = Some(name.into());
        let chosen = plan(&question).expect("an answer").chosen;
        assert_eq!(chosen.as_deref(), Some("one machine (m3-ultra-512)"), "{name}");
    }
    // Of one kind there is nothing to name.
    question.layout = None;
    question.machines.remove(0);
    assert_eq!(plan(&question).expect("an answer").layouts[0].layout, "one machine");
}

/// What does not fit says which part of the memory stays free.
#[test]
fn a_layout_that_does_not_fit_names_the_reserve() {
    let answer = plan(&question("deepseek-v3", "m4-pro-64", 2, 100)).expect("an answer");
    let why = answer.layouts.iter().find_map(|layout| layout.why.clone()).expect("it does not fit");
    assert!(why.contains("may use 43.2 GiB of its 48.0 GiB: a tenth stays free"), "{why}");
}

#[test]
fn the_most_is_found_within_a_twentieth() {
    for limit in [1, 2, 7, 100, 5000] {
        let found = most(100_000, |number| number <= limit).expect("1 holds");
        assert!(found <= limit && f64::from(found) >= 0.94 * f64::from(limit), "{found} of {limit}");
    }
    assert_eq!(most(64, |_| true), Some(64));
    assert_eq!(most(64, |_| false), None);
}

#[test]
fn a_trace_is_asked_again_and_says_how_often_its_requests_may_come() {
    let lines: Vec<String> = (0..60)
        .map(|nth| {
            let at_s = 20.0 * f64::from(nth);
            format!(
                "{{\"at_s\":{at_s},\"prompt_tokens\":300,\"completion_tokens\":50,\"cached_tokens\":100}}"
            )
        })
        .collect();
    let question = r#"{"model":"llama-8b","machines":[{"machine":"m4-pro-64","count":1}],"users":3,
        "requests_per_user_day":20,"prompt_tokens":500,"answer_tokens":200,"money":{"machine_price":2000}}"#;
    let mut question = Question::read(question.as_bytes()).expect("a question");
    question.trace = Some(Trace::read(&lines.join("\n")).expect("a trace"));
    let answer = plan(&question).expect("an answer");
    let load = answer.load.expect("a load");
    assert!((load.requests_s - 60.0 / 1180.0).abs() < 1e-9, "{}", load.requests_s);
    assert!(load.simulated.meets_goal && load.simulated.busy < 0.5, "{:?}", load.simulated);
    let times = answer.most_times.expect("a rate");
    assert!((1.5..50.0).contains(&times), "{times}");
    assert_eq!((answer.most_users, answer.most_at_once), (None, None));
    // The energy above idle follows the trace's own busy share.
    assert!(answer.money.expect("costs").joules_token.is_some_and(|joules| joules > 0.0));
    question.goal.first_token_s = 0.01;
    assert_eq!(plan(&question).expect("an answer").most_times, None);
}

/// Output of `thunder bench report`, with one change.
fn measured(name: &str, value: Value) -> Value {
    let mut measured = json!({
        "model": "m", "ranks": 1, "decode": [{ "rows": 1, "seconds": 0.01 }], "prompt": [{ "rows": 256, "seconds": 0.2 }],
        "decode_pair_s": 1e-6, "prompt_pair_s": 1e-7, "sequences": 4, "rows": 256, "kv_tokens": 4096, "context": 2048,
    });
    measured[name] = value;
    measured
}

#[test]
fn a_question_as_json_has_the_trace_and_what_was_measured_within() {
    let lines = "{\"at_s\":0,\"prompt_tokens\":300,\"completion_tokens\":50}\n".repeat(3);
    let mut json = json!({
        "model": "llama-8b", "machines": [{ "machine": "m4-pro-64", "count": 1 }], "users": 3,
        "requests_per_user_day": 20, "prompt_tokens": 500, "answer_tokens": 200,
    });
    let read = |json: &Value| Question::read(json.to_string().as_bytes());
    let mut plain = read(&json).expect("a question");
    json["trace"] = lines.as_str().into();
    plain.trace = Some(Trace::read(&lines).expect("a trace"));
    assert_eq!(read(&json).expect("a question"), plain);
    json["measured"] = measured("ranks", json!(2));
    let refused = plan(&read(&json).expect("a question")).expect_err("another model").to_string();
    assert!(refused.contains("model is llama-8b") && refused.contains("are of m:"), "{refused}");
    json["model"] = "m".into();
    let answer = plan(&read(&json).expect("a question")).expect("an answer");
    assert!(answer.assumptions[0].contains("m on 2 rank(s)"), "{:?}", answer.assumptions);
    assert!(answer.load.is_some() && answer.layouts.is_empty(), "{answer:?}");
    json["trace"] = "{\"at_s\":0}".into();
    let refused = read(&json).expect_err("no tokens").to_string();
    assert!(refused.starts_with("the trace's line 1: missing field"), "{refused}");
    (json["trace"], json["measured"]) = (Value::Null, measured("sequences", json!(0)));
    let refused = read(&json).expect_err("no sequences").to_string();
    assert!(refused.contains("sequences is 0"), "{refused}");
}

#[test]
fn absurd_measurements_are_refused_or_answered() {
    for (name, value) in [
        ("kv_tokens", json!(0)),
        ("context", json!(0)),
        ("rows", json!(1)),
        ("sequences", json!(4096)),
        ("step_time_s", json!(0)),
        ("step_time_s", json!(1e300)),
        ("wake_s", json!(1e6)),
        ("decode", json!([{ "rows": 1, "seconds": 0 }])),
        ("prompt", json!([{ "rows": 0, "seconds": 0 }])),
    ] {
        let question = json!({
            "model": "m", "machines": [{ "machine": "m4-pro-64", "count": 1 }], "users": 1, "requests_per_user_day": 1,
            "prompt_tokens": 300, "answer_tokens": 20, "measured": measured(name, value.clone()),
        });
        // Any outcome is right, except a panic or an endless run.
        match Question::read(question.to_string().as_bytes()).and_then(|question| plan(&question)) {
            Ok(answer) => assert!(answer.load.is_some(), "{name} {value}"),
            Err(error) => assert!(error.to_string().contains(" is "), "{name} {value}: {error}"),
        }
    }
}
