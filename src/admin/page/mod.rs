//! The HTML of the page. It is rendered here; the script only refreshes it, asks for confirmation, and sends what was
//! confirmed.

mod all;
mod links;
mod markup;
mod one;

use axum::response::{Html, IntoResponse, Response};
use http::header::CONTENT_TYPE;
use maud::{DOCTYPE, Markup, html};

pub(super) use self::all::all;
use self::links::Root;
pub(super) use self::one::one;
use super::problem::Problem;

const SCRIPT: &str = include_str!("../admin.js");
const STYLE: &str = include_str!("../admin.css");

pub(super) async fn script() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/javascript; charset=utf-8")], SCRIPT)
}

pub(super) async fn style() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/css; charset=utf-8")], STYLE)
}

fn document(root: &Root, title: &str, main: &Markup) -> Html<String> {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                link rel="stylesheet" href={ (root.0) "admin.css" };
                script src={ (root.0) "admin.js" } defer {}
            }
            body {
                a.skip href="#main" { "Skip to the content" }
                header {
                    nav aria-label="Semaphores" { a href=(root.all()) { "Semaphores" } }
                    p #fresh { noscript { "Without JavaScript this page is not refreshed, and its buttons do nothing." } }
                }
                div #stale hidden {
                    p #stale-reason role="alert" {}
                    p #stale-age {}
                }
                p #told role="status" {}
                main #main tabindex="-1" { (main) }
                dialog #ask aria-labelledby="ask-title" aria-describedby="ask-text" {
                    form #ask-form method="dialog" {
                        h2 #ask-title {}
                        p #ask-text {}
                        p #ask-field hidden {
                            label #ask-label for="ask-number" {}
                            input #ask-number type="number" inputmode="numeric" step="1" required
                                autocomplete="off";
                        }
                        p.do {
                            button #ask-cancel type="button" { "Cancel" }
                            button #ask-confirm type="submit" { "Confirm" }
                        }
                    }
                }
            }
        }
    };
    Html(page.into_string())
}

/// Replaces a page that cannot be rendered. The script tries again.
fn failed(root: &Root, problem: &Problem) -> Response {
    let main = html! {
        h1 { "Nothing can be shown" }
        p #problem role="alert" { (problem.detail) }
    };
    (problem.status, document(root, "Semaphores", &main)).into_response()
}
