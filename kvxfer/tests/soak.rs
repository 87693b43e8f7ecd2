//! Many hand-overs with random faults, over TCP.
#![allow(missing_docs)]

mod cases {
    kvxfer_cases::soak!(kvxfer_cases::TCP);
}
