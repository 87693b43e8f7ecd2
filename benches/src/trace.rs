//! Request traces: JSON lines and CSV, one request per line. The formats are described in `docs/benchmark.md`.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use kvxfer_core::{Error, ErrorKind, Result};
use serde::Deserialize;

/// Tokens that one hash id of a JSON line stands for.
pub(crate) const HASH_BLOCK_TOKENS: u32 = 512;
/// Tokens of one request, at most: more is taken for a mistake in the file.
const TOKENS_MAX: u64 = 16 << 20;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// When it comes, counted from the first.
    pub(crate) at: Duration,
    /// Tokens of its prompt: what is handed over.
    pub(crate) tokens: u32,
    /// Identities of its leading blocks of [`HASH_BLOCK_TOKENS`] tokens; requests that begin alike share them.
    pub(crate) hash_ids: Vec<u64>,
    /// Line in the file, for messages.
    pub(crate) line: u64,
}

/// Reads the first `limit` requests of a file. They come back in the order of their times.
pub(crate) fn read(path: &Path, limit: usize) -> Result<Vec<Request>> {
    let fail = |why: String, remedy: &str| {
        Error::new(ErrorKind::InvalidArgument, "reading a trace")
            .at(path.display().to_string())
            .because(why)
            .remedy(remedy)
    };
    let file = File::open(path).map_err(|error| fail(error.to_string(), "give the path of a .jsonl or .csv trace"))?;
    let reader = BufReader::new(file);
    let mut requests = match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl" | "json") => read_json_lines(path, reader, limit),
        Some("csv") => read_csv(path, reader, limit),
        _ => Err(fail(
            "the name ends in neither .jsonl nor .csv".into(),
            "rename it: .jsonl for JSON lines, .csv for comma-separated values",
        )),
    }?;
    requests.sort_by_key(|request| request.at);
    let Some(first) = requests.first().map(|request| request.at) else {
        return Err(fail(
            "it holds no request".into(),
            "give a trace with at least one request, and --requests at least 1",
        ));
    };
    for request in &mut requests {
        request.at -= first;
    }
    Ok(requests)
}

#[derive(Deserialize)]
struct JsonRequest {
    timestamp: f64,
    input_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

fn read_json_lines(path: &Path, reader: impl BufRead, limit: usize) -> Result<Vec<Request>> {
    const EXPECTED: &str = r#"expected an object like {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]} with the time in milliseconds"#;
    let mut requests = Vec::new();
    for (index, line) in reader.lines().enumerate() {
        let number = index as u64 + 1;
        let bad = |why: String| bad_line(path, number, &why, EXPECTED);
        let line = line.map_err(|error| bad(error.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        if requests.len() == limit {
            break;
        }
        let parsed: JsonRequest = serde_json::from_str(&line).map_err(|error| bad(error.to_string()))?;
        if !(parsed.timestamp.is_finite() && (0.0..1e13).contains(&parsed.timestamp)) {
            return Err(bad(format!(
                "timestamp {} is no time in milliseconds",
                parsed.timestamp
            )));
        }
        requests.push(Request {
            at: Duration::from_secs_f64(parsed.timestamp / 1e3),
            tokens: tokens(parsed.input_length).map_err(|why| bad(format!("input_length {why}")))?,
            hash_ids: parsed.hash_ids,
            line: number,
        });
    }
    Ok(requests)
}

fn read_csv(path: &Path, reader: impl BufRead, limit: usize) -> Result<Vec<Request>> {
    const HEADER: &str = "expected a header with the columns TIMESTAMP, ContextTokens and GeneratedTokens";
    const EXPECTED: &str = "expected a line like 2023-11-16 18:17:03.9799600,4808,10";
    let mut records = csv::ReaderBuilder::new()
        .flexible(true)
        .trim(csv::Trim::All)
        .from_reader(reader);
    let header = records
        .headers()
        .map_err(|error| bad_line(path, 1, &error.to_string(), HEADER))?;
    let column = |name: &str| {
        header
            .iter()
            .position(|field| field.eq_ignore_ascii_case(name))
            .ok_or_else(|| bad_line(path, 1, &format!("there is no column {name}"), HEADER))
    };
    let (time, context) = (column("TIMESTAMP")?, column("ContextTokens")?);
    let mut requests = Vec::new();
    for record in records.records().take(limit) {
        let record = record.map_err(|error| {
            let line = error.position().map_or(0, |position| position.line());
            bad_line(path, line, &error.to_string(), EXPECTED)
        })?;
        let line = record.position().map_or(0, |position| position.line());
        let bad = |why: String| bad_line(path, line, &why, EXPECTED);
        let field = |at: usize| {
            record
                .get(at)
                .ok_or_else(|| bad(format!("there is no field {}", at + 1)))
        };
        let at = time_of_day(field(time)?).ok_or_else(|| {
            bad(format!(
                "TIMESTAMP {:?} is no date and time",
                record.get(time).unwrap_or_default()
            ))
        })?;
        let count: u64 = field(context)?.parse().map_err(|_| {
            bad(format!(
                "ContextTokens {:?} is no number",
                record.get(context).unwrap_or_default()
            ))
        })?;
        requests.push(Request {
            at,
            tokens: tokens(count).map_err(|why| bad(format!("ContextTokens {why}")))?,
            hash_ids: Vec::new(),
            line,
        });
    }
    Ok(requests)
}

fn tokens(count: u64) -> Result<u32, String> {
    match count {
        1..=TOKENS_MAX => Ok(count as u32),
        _ => Err(format!("{count} is not between 1 and {TOKENS_MAX}")),
    }
}

/// `YYYY-MM-DD hh:mm:ss[.fraction]`, since the year 0 of the proleptic calendar; only differences are used.
fn time_of_day(text: &str) -> Option<Duration> {
    let (date, clock) = text.trim().split_once([' ', 'T'])?;
    let mut date = date.splitn(3, '-');
    let (year, month, day): (u64, u64, u64) = (
        date.next()?.parse().ok()?,
        date.next()?.parse().ok()?,
        date.next()?.parse().ok()?,
    );
    let mut clock = clock.splitn(3, ':');
    let (hour, minute): (u64, u64) = (clock.next()?.parse().ok()?, clock.next()?.parse().ok()?);
    let seconds = clock.next()?;
    let (second, fraction) = seconds.split_once('.').unwrap_or((seconds, ""));
    let second: u64 = second.parse().ok()?;
    let sane = (1..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !sane || fraction.len() > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos: u64 = format!("{fraction:0<9}").parse().ok()?;
    // Days of the civil calendar, years beginning in March so that the leap day is the last.
    let shifted = (month + 9) % 12;
    let years = if month < 3 { year - 1 } else { year };
    let days = 365 * years + years / 4 - years / 100 + years / 400 + (153 * shifted + 2) / 5 + day - 1;
    Some(Duration::from_secs(((days * 24 + hour) * 60 + minute) * 60 + second) + Duration::from_nanos(nanos))
}

fn bad_line(path: &Path, line: u64, why: &str, expected: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, "a line of a trace")
        .at(format!("{}, line {line}", path.display()))
        .because(why)
        .remedy(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Result<Vec<Request>> {
        read_json_lines(Path::new("t.jsonl"), text.as_bytes(), usize::MAX)
    }

    fn csv(text: &str) -> Result<Vec<Request>> {
        read_csv(Path::new("t.csv"), text.as_bytes(), usize::MAX)
    }

    #[test]
    fn both_formats_are_read() {
        let requests = json("{\"timestamp\": 1500, \"input_length\": 700, \"output_length\": 3, \"hash_ids\": [0, 9]}\n\n{\"timestamp\": 2000.5, \"input_length\": 1}\n").unwrap();
        assert_eq!((requests.len(), requests[0].tokens, requests[0].line), (2, 700, 1));
        assert_eq!(requests[0].hash_ids, [0, 9]);
        assert_eq!(requests[1].at - requests[0].at, Duration::from_micros(500_500));
        assert_eq!(requests[1].line, 3);

        let requests = csv("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-30 23:59:59.9799600,4808,10\n2023-12-01 00:00:00.0000000,110,8\n2023-12-01 00:00:02,7,8").unwrap();
        assert_eq!(requests.len(), 3);
        assert_eq!(requests[1].at - requests[0].at, Duration::from_nanos(20_040_000));
        assert_eq!(requests[2].at - requests[1].at, Duration::from_secs(2));
        assert_eq!((requests[0].tokens, requests[1].line), (4808, 3));
    }

    #[test]
    fn a_bad_line_is_named_with_what_was_expected() {
        let cases = [
            json("{\"timestamp\": 1, \"input_length\": 5}\n{\"timestamp\": 1}"),
            json("{\"timestamp\": 1, \"input_length\": 5}\n{\"timestamp\": 1, \"input_length\": 0}"),
            json("{\"timestamp\": 1, \"input_length\": 5}\n{\"timestamp\": -1, \"input_length\": 5}"),
            json("{\"timestamp\": 1, \"input_length\": 5}\nTIMESTAMP"),
            csv("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:61:03.9,1,1"),
            csv("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,many,1"),
            csv("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9"),
            csv("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1"),
        ];
        for case in cases {
            let error = case.unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains("expected"), "{error}");
        }
        let error = csv("time,tokens\n1,2").unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("TIMESTAMP"), "{error}");
    }

    #[test]
    fn a_missing_file_and_an_unknown_ending_are_refused() {
        let error = read(Path::new("/nonexistent/t.jsonl"), 1).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/t.jsonl"), "{error}");
        let error = read(Path::new("/dev/null"), 1).unwrap_err().to_string();
        assert!(error.contains(".csv"), "{error}");
    }
}
